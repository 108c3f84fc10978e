"""The cluster of a script: worker processes on this machine, which are started and ended by the script itself.

    with Cluster.local(processes=4) as cluster:
        group = Mine.create_group(config).launch(cluster, name="mine")
        results = group.step().wait()

The script takes the place of the runner of a job: it has the hub, with which the worker processes register. Supervisors, worker processes
and channel server are those of a job. No process outlives the script, whatever ends it.
"""

import atexit
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.channel import client as channel_client
from rl_core.launch import script_pods
from rl_core.launch.local_pod import LocalPod
from rl_core.launch.ports import free_ports
from rl_core.launch.workspace import Workspace
from rl_core.plan.groups import SCRIPT_WORKERS
from rl_core.plan.placement import (
    FlexiblePlacementStrategy,
    Inventory,
    NodeInfo,
    Placement,
    PlacementStrategy,
)
from rl_core.transports.curve import KeyRing
from rl_core.workers.cluster import Cluster as WorkerCluster
from rl_core.workers.hub import Hub

HOST = "127.0.0.1"
HEARTBEAT_SECONDS = 0.5
"""Seconds between heartbeats: workers learn with them that another one is lost."""


class Cluster(WorkerCluster):
    """Worker processes of this machine for the groups of a script. Make one with `local`."""

    _open: ClassVar["Cluster | None"] = None
    """The cluster of this process. There is one at a time, because channels are found through it."""

    @classmethod
    def local(
        cls, processes: int | None = None, *, gpus: int = 0, output: str | os.PathLike[str] | None = None
    ) -> Self:
        """Start a cluster on this machine. A slot is a place for one worker process of each group; a slot may have a GPU.

        - `processes`: number of slots. None means one for each GPU, or one without GPUs.
        - `gpus`: number of GPUs of the machine that are used. Each slot is then one of them.
        - `output`: folder for the output of all processes, in `logs/<group>-0.log`; it is made and kept. None: they write to standard error.

        Groups share the slots: `launch` without a placement strategy starts one process in each. Use the cluster in a `with` statement, or
        call `close`. Raises ConfigError when this process has a cluster already, when it is itself a worker process, and for numbers that
        are too small or do not fit together.
        """
        slots = (gpus or 1) if processes is None else processes
        if slots < 1 or gpus < 0 or gpus not in (0, slots):
            raise ConfigError(
                "Cluster.local needs processes >= 1 and, with gpus, one process per GPU, got "
                f"processes={processes}, gpus={gpus}; leave processes out to have one slot for each GPU"
            )
        if os.environ.get("RLJOB_ROLE") == SCRIPT_WORKERS:
            raise ConfigError(
                "Cluster.local must not be called when a worker process imports the script; "
                'put the code that runs the script under `if __name__ == "__main__":`'
            )
        if Cluster._open is not None:
            raise ConfigError("a process can have one cluster at a time; close the other one first")
        return cls(slots, gpus=gpus, output=output)

    def __init__(self, slots: int, *, gpus: int, output: str | os.PathLike[str] | None) -> None:
        """Use `local`, which checks the arguments."""
        node = NodeInfo(0, slots, "GPU" if gpus else "slot")
        self._inventory, self._slots, self._gpus = Inventory([node]), slots, gpus
        self._groups: set[str] = set()
        self._end_reasons: dict[str, str] = {}
        """Group name -> reason, for groups whose processes have ended and are not started again."""
        self._close_lock = threading.Lock()
        """Guards `_closed`: the end of the script and `close` may come at the same time."""
        self._closed = False
        self._temporary = Path(tempfile.mkdtemp(prefix="rljob-")) if output is None else None
        self._space = Workspace(self._temporary or Path(output or "."))
        uid = secrets.token_hex(8)
        self._space.open(uid=uid, job=None, groups=script_pods.KINDS)
        ports = free_ports(HOST)
        identity = Identity(
            job="script",
            namespace="default",
            uid=uid,
            epoch=0,
            role="runner",
            pod="script",
            pod_index=0,
            group="runner",
            rank=0,
            world_size=1,
            hub=f"tcp://{HOST}:{ports.hub}",
            channel=f"tcp://{HOST}:{ports.channel}",
            curve_dir=str(self._space.key_folder),
        )
        ring = KeyRing(self._space.key_folder, "runner", script_pods.KINDS)
        super().__init__(
            Hub(identity=identity, keys=ring, kinds=script_pods.KINDS, heartbeat_seconds=HEARTBEAT_SECONDS)
        )
        self._environ = script_pods.shared_environment(uid=uid, hub=identity.hub, channel=identity.channel)
        self._pods = script_pods.ScriptPods(self._space, keep_logs=output is not None, on_end=self._on_end)
        Cluster._open = self
        atexit.register(self.close)
        try:
            self.hub.start()
            self._pods.start(script_pods.channel_pod(self._environ))
            channel_client.configure(identity.channel, ring, identity)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes and the channel server. Calls and channel operations under way fail. May be called again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        Cluster._open = None
        atexit.unregister(self.close)
        self._pods.close()
        channel_client.release()
        super().close()
        self.hub.close()
        self._space.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def start_group(self, name: str, placement_strategy: object | None, *, isolate_gpu: bool) -> None:
        """Start the processes of the group `name`: one in each slot, or those of the placement strategy.

        Resources of a strategy are the slots, numbered from 0. Raises ConfigError for a name that is used already or is no name of a group,
        and for something that is no strategy; PlacementError when the strategy does not fit the slots.
        """
        if self._closed:
            raise ConfigError(f"group {name} must be launched before the cluster is closed")
        if name in self._groups:
            raise ConfigError(f"the name of a group must be used once in a cluster, got {name} again; rename one group")
        _check_name(name)
        strategy = placement_strategy or FlexiblePlacementStrategy([[slot] for slot in range(self._slots)])
        if not isinstance(strategy, PlacementStrategy):
            raise ConfigError(
                f"placement_strategy must be one of rl_core.plan.placement, such as PackedPlacementStrategy(0, 3), got {strategy!r}"
            )
        placements = strategy.get_placement(self._inventory, isolate_gpu)
        if not self._gpus:
            placements = [_on_cpu(placement) for placement in placements]
        self._groups.add(name)
        self.sizes[name] = len(placements)
        self._pods.start(script_pods.worker_pod(name, placements, self._environ))

    def wait_ready(
        self, roles: Iterable[str], timeout: float | None = None, *, on_poll: Callable[[], None] = lambda: None
    ) -> None:
        """Wait as in a job. Also raises InfrastructureError when the processes of a group have ended for good."""
        names = [roles] if isinstance(roles, str) else list(roles)

        def check() -> None:
            on_poll()
            for name in names:
                if name in self._end_reasons:
                    raise InfrastructureError(f"the processes of group {name} have ended: {self._end_reasons[name]}")

        super().wait_ready(names, timeout, on_poll=check)

    def _on_end(self, pod: LocalPod) -> None:
        if pod.expected:
            return
        reason = pod.reason or f"its supervisor ended with code {pod.returncode}"
        self._end_reasons[pod.role] = reason
        for member in self.members():
            if member.group == pod.role:
                self.hub.declare_lost(member, reason)


def _on_cpu(placement: Placement) -> Placement:
    """Return the placement of a process in a slot that is no accelerator."""
    return replace(placement, visible_accelerators=[], accelerator_type=None, local_accelerator_rank=-1)


def _check_name(name: str) -> None:
    from pydantic import ValidationError

    from rl_core.api.groups import GroupSpec

    try:
        GroupSpec(name=name, worker="module:Class")
    except ValidationError as error:
        raise ConfigError(f"name of a group: {error.errors()[0]['msg']}") from error
