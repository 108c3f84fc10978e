"""From a job to processes: which pods, containers and processes there are, with ranks, devices, environment and command.

Pure: equal arguments give byte-equal JSON and digest. The operator makes pods of the plan, rl_core.launch.local processes; neither
adds more than secret mounts, host names and folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rl_core.api.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.api.job import RLJob, RLJobSpec
    from rl_core.api.roles import RoleSpec

ROLES = ("actor", "rollout", "env")
WORKER_COMMAND = ("python", "-m", "rl_core.workers.host")
RUNNER_COMMAND = ("python", "-m", "rl_core.runner")
CHANNEL_COMMAND = ("python", "-m", "rl_core.channel")
CONFIG_PATH = "/etc/rljob/job.json"
"""Where pods of the actor find the resolved job; local mode passes its own path."""
CURVE_PATH = "/etc/rljob/keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Ports of actor-0 (hub, channel, control), of gloo/NCCL rendezvous, of every supervisor (health), of env and rollout pods (rpc)."""

    hub: int = 7700
    channel: int = 7701
    control: int = 7702
    health: int = 7703
    master: int = 7704
    rpc: int = 7705
    """Worker RPC on a cluster, where policies name it; free ports elsewhere."""


class _Plan:
    """What all parts of a plan can do: to canonical JSON and back, byte for byte."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the plan as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote."""
        return cls._read(json.loads(text))

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuClaim(_Plan):
    """Accelerators of a pod."""

    count: int
    type: str | None = None
    """Device class; None = any."""
    shared: bool = False
    """Whether containers of the pod share the claim."""
    name: str | None = None
    """A claim that other pods share too; None = the pod has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlan(_Plan):
    """One process under a supervisor."""

    name: str
    """Unique inside the pod: runner, channel, actor-0, ..."""
    group: str
    rank: int
    command: tuple[str, ...]
    env: dict[str, str]
    visible_devices: tuple[str, ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    restart: bool = False
    """Whether the supervisor restarts it (rollout and env workers); otherwise its end ends the pod."""

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "command": tuple(value["command"]), "visible_devices": tuple(value["visible_devices"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan(_Plan):
    """One container: one supervisor with its processes."""

    name: str
    image_role: str
    processes: tuple[ProcessPlan, ...]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "processes": tuple(ProcessPlan._read(process) for process in value["processes"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class PodPlan(_Plan):
    """One pod, `<job>-<role>-<index>`."""

    name: str
    role: str
    index: int
    containers: tuple[ContainerPlan, ...]
    node_group: str | None = None
    claim: GpuClaim | None = None
    shm_bytes: int = 0
    """Size of /dev/shm the pod needs; 0 = the runtime's default."""

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        containers = tuple(ContainerPlan._read(container) for container in value["containers"])
        claim = GpuClaim._read(value["claim"]) if value["claim"] else None
        return cls(**{**value, "containers": containers, "claim": claim})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan(_Plan):
    """All pods of a job under one epoch."""

    job: str
    namespace: str
    uid: str
    epoch: int
    pods: tuple[PodPlan, ...]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "pods": tuple(PodPlan._read(pod) for pod in value["pods"])})

    def pods_of(self, role: str) -> tuple[PodPlan, ...]:
        """Return the pods of one role, by index."""
        return tuple(pod for pod in self.pods if pod.role == role)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """What all processes of a plan share."""

    spec: RLJobSpec
    name: str
    namespace: str
    uid: str
    epoch: int
    ports: Ports
    host: str
    config: str
    local: bool
    attempts: Mapping[str, int]


def build_launch_plan(
    job: RLJob | RLJobSpec,
    *,
    name: str,
    namespace: str = "default",
    uid: str,
    epoch: int = 0,
    replicas: Mapping[str, int] | None = None,
    ports: Ports | None = None,
    host: str | None = None,
    config: str = CONFIG_PATH,
    attempts: Mapping[str, int] | None = None,
) -> LaunchPlan:
    """Return the plan of `job` under `epoch`.

    `replicas` overrides the pod counts of elastic roles (`{"rollout": 4}`). `host` None: actor-0's name in the job's headless
    Service; a host (local mode, 127.0.0.1): all pods share that machine, so that devices are numbered over all of them.
    `attempts` by role is the first half of the incarnation of pods made now; a replacement needs a higher one than its forerunner.
    Raises ConfigError for replicas of another role or below 0, and for accelerators that do not divide over processes.
    """
    spec: RLJobSpec = job.spec if hasattr(job, "spec") else job
    counts = {"actor": spec.actor.replicas, "rollout": spec.rollout.replicas, "env": spec.env.replicas}
    for role, count in (replicas or {}).items():
        if role not in ("rollout", "env") or count < 0:
            raise ConfigError(
                f"replicas may override rollout and env with a count of at least 0, got {role}: {count}; correct it"
            )
        counts[role] = count
    context = _Context(
        spec=spec,
        name=name,
        namespace=namespace,
        uid=uid,
        epoch=epoch,
        ports=ports or Ports(),
        host=host or f"{name}-actor-0.{name}.{namespace}.svc",
        config=config,
        local=host is not None,
        attempts=attempts or {},
    )
    pods, taken = [], 0
    for role in ROLES:
        of_role: RoleSpec = getattr(spec, role)
        for index in range(counts[role]):
            pods.append(_build_pod(context, role, index, of_role, counts[role], taken if context.local else 0))
            taken += of_role.gpus
    return LaunchPlan(job=name, namespace=namespace, uid=uid, epoch=epoch, pods=tuple(pods))


def _build_pod(context: _Context, role: str, index: int, spec: RoleSpec, count: int, first_device: int) -> PodPlan:
    per_pod = context.spec.actor.processes_per_pod if role == "actor" else 1
    if spec.gpus % per_pod:
        raise ConfigError(
            f"{role}.gpus must be a multiple of processesPerPod {per_pod}, got {spec.gpus}; change one of them"
        )
    processes = []
    if role == "actor" and index == 0:
        processes += [_service(context, "runner", RUNNER_COMMAND), _service(context, "channel", CHANNEL_COMMAND)]
    share = spec.gpus // per_pod
    for local in range(per_pod):
        devices = tuple(str(first_device + local * share + offset) for offset in range(share))
        processes.append(_worker(context, role, index, local, spec, count * per_pod, per_pod, devices))
    return PodPlan(
        name=f"{context.name}-{role}-{index}",
        role=role,
        index=index,
        containers=(ContainerPlan(name=role, image_role=role, processes=tuple(processes)),),
        claim=GpuClaim(count=spec.gpus) if spec.gpus else None,
    )


def _identity(context: _Context, role: str, pod_role: str, index: int) -> dict[str, str]:
    env = {
        "RLJOB_NAME": context.name,
        "RLJOB_NAMESPACE": context.namespace,
        "RLJOB_UID": context.uid,
        "RLJOB_EPOCH": str(context.epoch),
        "RLJOB_ROLE": role,
        "RLJOB_POD": f"{context.name}-{pod_role}-{index}",
        "RLJOB_POD_INDEX": str(index),
        "RLJOB_INCARNATION": f"{context.attempts.get(pod_role, 0)}.0",
        "RLJOB_HUB": f"tcp://{context.host}:{context.ports.hub}",
        "RLJOB_CHANNEL": f"tcp://{context.host}:{context.ports.channel}",
        "RLJOB_CURVE_DIR": CURVE_PATH,
        "RLJOB_HEALTH_PORT": str(context.ports.health),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if pod_role == "actor":
        env |= {"RLJOB_CONFIG": context.config, "RLJOB_CONTROL_PORT": str(context.ports.control)}
    return env


def _service(context: _Context, role: str, command: tuple[str, ...]) -> ProcessPlan:
    """Return the runner or the channel server, processes of actor-0."""
    port = {"runner": context.ports.hub, "channel": context.ports.channel}[role]
    ports = {"hub": port, "control": context.ports.control} if role == "runner" else {"channel": port}
    env = dict(context.spec.actor.env) | _identity(context, role, "actor", 0)
    env |= {"GROUP_NAME": role, "WORKER_NAME": f"{role}:0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return ProcessPlan(name=role, group=role, rank=0, command=command, env=env, ports=ports)


def _worker(
    context: _Context,
    role: str,
    index: int,
    local: int,
    spec: RoleSpec,
    world: int,
    per_pod: int,
    devices: tuple[str, ...],
) -> ProcessPlan:
    """Return one worker process; `devices` are the accelerators it sees, isolated from its neighbours."""
    rank = index * per_pod + local
    env = dict(spec.env) | _identity(context, role, role, index)
    env |= {
        "GROUP_NAME": role,
        "WORKER_NAME": f"{role}:{rank}",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(index),
        "CLUSTER_NODE_RANK": str(index),
        "NODE_LOCAL_RANK": str(local),
        "NODE_LOCAL_WORLD_SIZE": str(per_pod),
        "LOCAL_ACCELERATOR_RANK": devices[0] if devices else "-1",
        "LOCAL_HARDWARE_RANKS": ",".join(devices),
        "VISIBLE_DEVICES": ",".join(devices),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "ACCELERATOR_TYPE": "GPU" if devices else "",
        "ISOLATE_ACCELERATOR": "1",
        "NODE_GROUP_LABEL": "cluster" if devices else "node",
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if role == "actor":
        env |= {"MASTER_ADDR": context.host, "MASTER_PORT": str(context.ports.master)}
    elif not context.local:
        env |= {"RLJOB_RPC_PORT": str(context.ports.rpc)}
    return ProcessPlan(
        name=f"{role}-{rank}",
        group=role,
        rank=rank,
        command=WORKER_COMMAND,
        env=env,
        visible_devices=devices,
        restart=role != "actor",
    )
