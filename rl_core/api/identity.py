"""The identity of a process, read once from the environment variables that the launch plan gives it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rl_core.api.errors import ConfigError

RoleName = Literal["actor", "rollout", "env"]
ROLES: tuple[str, ...] = get_args(RoleName)
"""Names of the groups that every job has, in the order in which their pods are planned. A role is the name of a group in the job, in
its status and in labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity of one process of a job; `rl_core.plan.placement.Placement` says where it runs."""

    job: str
    """Job name."""
    namespace: str
    """Namespace of the job; "default" in local mode."""
    uid: str
    """Unique id of the job object; messages of another uid are refused."""
    epoch: int
    """Epoch at the start of the process: the number of gang restarts of the job, a fencing token. Later the epoch of the hub is used."""
    role: str
    """runner, channel, supervisor, or for a worker the name of its group."""
    pod: str
    """Pod name, `<job>-<role>-<index>`."""
    pod_index: int
    """Index of the pod among those of its group."""
    group: str
    """Worker group; for workers the same as `role`."""
    rank: int
    """Rank in the group."""
    world_size: int
    """Planned number of processes of the group; elastic groups change it while they run."""
    attempt: int = 0
    """Number of the pod's start, given by the operator or the launcher; first half of the incarnation."""
    restarts: int = 0
    """Restarts of the process in its pod, counted by the supervisor; second half of the incarnation."""
    hub: str = ""
    """Address of the runner's hub, `tcp://host:port`."""
    channel: str = ""
    """Address of the channel server, `tcp://host:port`."""
    curve_dir: str = ""
    """Folder with CURVE keys; empty = no keys, loopback only."""
    config: str = ""
    """Path of the resolved job (JSON); empty where the process gets the job when it registers."""
    pod_ip: str = ""
    """Address under which other pods reach this process; empty = that of its socket."""
    rpc_port: int = 0
    """Port of this worker's RPC server; 0 = any free one."""
    endpoint_port: int = 0
    """Port of the OpenAI endpoint of a rollout; 0 = any free one."""
    in_cluster: bool = False
    """Whether the process runs in a pod of a cluster, where the job waits for missing members without a limit."""

    @property
    def is_worker(self) -> bool:
        """Return whether the process is a member of a worker group, in contrast to the runner and the channel server."""
        return self.role not in ("runner", "channel", "supervisor")

    @property
    def incarnation(self) -> tuple[int, int]:
        """(attempt, restarts): the number of the pod's start and of the restarts of the process in it.

        A higher one replaces a lower one.
        """
        return (self.attempt, self.restarts)

    @property
    def name(self) -> str:
        """Return `group:rank`."""
        return f"{self.group}:{self.rank}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Identity":
        """Return the identity written in `environ` (the process environment when None).

        Raises ConfigError naming the first variable that is missing or not a number.
        """
        env = os.environ if environ is None else environ

        def text(key: str, default: str | None = None) -> str:
            value = env.get(key, default)
            if value is None:
                raise ConfigError(
                    f"environment variable {key} must be set for a worker process, got nothing; start it through `rljob run` or the operator"
                )
            return value

        def number(key: str, default: str | None = None) -> int:
            value = text(key, default)
            try:
                return int(value)
            except ValueError as error:
                raise ConfigError(f"environment variable {key} must be an integer, got {value!r}") from error

        attempt, _, restarts = text("RLJOB_INCARNATION", "0.0").partition(".")
        try:
            incarnation = (int(attempt), int(restarts or 0))
        except ValueError as error:
            raise ConfigError(
                f"environment variable RLJOB_INCARNATION must be ATTEMPT.RESTARTS, got {env.get('RLJOB_INCARNATION')!r}"
            ) from error
        role = text("RLJOB_ROLE")
        return cls(
            job=text("RLJOB_NAME"),
            namespace=text("RLJOB_NAMESPACE", "default"),
            uid=text("RLJOB_UID"),
            epoch=number("RLJOB_EPOCH", "0"),
            role=role,
            pod=text("RLJOB_POD", ""),
            pod_index=number("RLJOB_POD_INDEX", "0"),
            group=text("GROUP_NAME", role),
            rank=number("RANK", "0"),
            world_size=number("WORLD_SIZE", "1"),
            attempt=incarnation[0],
            restarts=incarnation[1],
            hub=text("RLJOB_HUB", ""),
            channel=text("RLJOB_CHANNEL", ""),
            curve_dir=text("RLJOB_CURVE_DIR", ""),
            config=text("RLJOB_CONFIG", ""),
            pod_ip=text("RLJOB_POD_IP", ""),
            rpc_port=number("RLJOB_RPC_PORT", "0"),
            endpoint_port=number("RLJOB_ENDPOINT_PORT", "0"),
            in_cluster=bool(env.get("KUBERNETES_SERVICE_HOST") or env.get("RLJOB_POD_IP")),
        )


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker's place in the tree of groups: `WorkerAddress("G", (3,)).get_name() == "G:3"`."""

    root_group: str
    """Name of the group; no ":" in it."""
    rank_path: tuple[int, ...] | int = ()
    """Rank in the root group, then ranks of children."""

    def __post_init__(self) -> None:
        if ":" in self.root_group:
            raise ValueError(f"root_group must not contain ':', got {self.root_group!r}")
        path = (self.rank_path,) if isinstance(self.rank_path, int) else tuple(self.rank_path)
        object.__setattr__(self, "rank_path", path)

    def get_name(self) -> str:
        """Return the group and the ranks joined by ":"."""
        path = self.rank_path if isinstance(self.rank_path, tuple) else (self.rank_path,)
        return ":".join([self.root_group, *map(str, path)])

    def child(self, rank: int) -> "WorkerAddress":
        """Return the address of this worker's child with `rank`."""
        path = self.rank_path if isinstance(self.rank_path, tuple) else (self.rank_path,)
        return WorkerAddress(self.root_group, (*path, rank))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker reports about itself at hello."""

    address: WorkerAddress
    rank: int
    group_world_size: int
    cluster_node_rank: int = 0
    accelerator_type: str | None = None
    accelerator_rank: int = -1
    available_accelerators: tuple[str, ...] = ()
    device_uuids: tuple[str, ...] = ()
    node_ip: str = "127.0.0.1"
    node_port: int = 0
    hardware_infos: tuple[str, ...] = ()
