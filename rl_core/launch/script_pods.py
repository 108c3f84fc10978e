"""The processes of a cluster that a script starts: plans of their pods, and the thread that runs them.

Pods, supervisors and worker processes are those of a local run; only the runner is missing, because the script takes its place.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_core.launch.local_pod import LocalPod
from rl_core.launch.local_pods import LAST_SWEEP_SECONDS, LocalPods
from rl_core.launch.workspace import Workspace
from rl_core.plan.groups import KINDS_VARIABLE, SCRIPT_WORKERS, GroupKind, Lifecycle, kinds_as_variable
from rl_core.plan.launch import CHANNEL_COMMAND, COPY_SETTINGS, WORKER_COMMAND, ContainerPlan, PodPlan, ProcessPlan
from rl_core.plan.placement import Placement

Value = TypeVar("Value")

KINDS: Mapping[str, GroupKind] = {
    SCRIPT_WORKERS: GroupKind(name=SCRIPT_WORKERS, lifecycle=Lifecycle.GANG, callers=frozenset({SCRIPT_WORKERS})),
}
"""Rights of the key that all worker processes of a script share."""
END_SECONDS = 5.0
"""Seconds that worker processes have to end when the cluster is closed."""
LOG_LEVEL = "WARNING"


def channel_pod(environ: Mapping[str, str]) -> PodPlan:
    """Return the pod of the channel server. `environ` is that of `shared_environment`."""
    return _pod("channel", [_process("channel", "channel", 0, 1, CHANNEL_COMMAND, environ)])


def worker_pod(name: str, placements: Sequence[Placement], environ: Mapping[str, str]) -> PodPlan:
    """Return the pod of the group `name`, with a process for each placement. A process that fails is started again."""
    return _pod(
        name,
        [
            _process(
                name, SCRIPT_WORKERS, placement.rank, len(placements), WORKER_COMMAND, {**environ, **placement.to_env()}
            )
            for placement in placements
        ],
    )


def shared_environment(*, uid: str, hub: str, channel: str) -> dict[str, str]:
    """Return the variables that all processes of a script's cluster share. `hub` and `channel` are addresses, `tcp://host:port`."""
    return {
        "RLJOB_NAME": "script",
        "RLJOB_UID": uid,
        "RLJOB_EPOCH": "0",
        "RLJOB_HUB": hub,
        "RLJOB_CHANNEL": channel,
        "RLJOB_LOG_LEVEL": os.environ.get("RLJOB_LOG_LEVEL", LOG_LEVEL),
        KINDS_VARIABLE: kinds_as_variable(KINDS),
    }


def supervisor_environment(*, keep_logs: bool) -> dict[str, str]:
    """Return the environment of this process, with its `sys.path`, so that worker processes import what the script imports.

    Without `keep_logs`, supervisors log errors only, unless RLJOB_LOG_LEVEL is set: the script itself says which processes ended.
    """
    paths = [str(Path(path).absolute()) for path in sys.path]
    return {
        **COPY_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "RLJOB_LOG_LEVEL": LOG_LEVEL if keep_logs else "ERROR",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "RLJOB_GRACE_SECONDS": str(END_SECONDS),
    }


def _pod(name: str, processes: Sequence[ProcessPlan]) -> PodPlan:
    container = ContainerPlan(name=name, image_role=name, processes=tuple(processes))
    return PodPlan(name=f"script-{name}-0", role=name, index=0, containers=(container,))


def _process(
    group: str, role: str, rank: int, world: int, command: tuple[str, ...], environ: Mapping[str, str]
) -> ProcessPlan:
    identity = {
        "RLJOB_ROLE": role,
        "RLJOB_POD": f"script-{group}-0",
        "RLJOB_POD_INDEX": "0",
        "RLJOB_INCARNATION": "0.0",
        "GROUP_NAME": group,
        "WORKER_NAME": f"{group}:{rank}",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    devices = environ.get("VISIBLE_DEVICES", "")
    return ProcessPlan(
        name=f"{group}-{rank}",
        group=group,
        rank=rank,
        command=command,
        env={**environ, **identity},
        visible_devices=tuple(devices.split(",")) if devices else (),
        restart=role == SCRIPT_WORKERS,
    )


class ScriptPods:
    """Runs pods on an event loop of its own thread. The methods may be called from any other thread."""

    def __init__(self, space: Workspace, *, keep_logs: bool, on_end: Callable[[LocalPod], None]) -> None:
        """Start the thread.

        Pods write their output to the log files of `space` if `keep_logs` is true, and to standard error otherwise. `on_end(pod)` is called
        on the thread when a pod has ended.
        """
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rljob-pods", daemon=True).start()
        self._pods = LocalPods(
            space, environ=supervisor_environment(keep_logs=keep_logs), on_end=on_end, keep_logs=keep_logs
        )

    def start(self, plan: PodPlan) -> None:
        """Start a pod. Raises OSError when its process cannot be started."""

        async def start() -> None:
            self._pods.start(plan)

        self._run(start())

    def close(self) -> None:
        """End the pods of workers, then that of the channel server. Each part has END_SECONDS. Then kill what still runs."""
        self._run(self._end())
        self._pods.sweep(seconds=LAST_SWEEP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _end(self) -> None:
        pods = list(self._pods)
        # The channel server ends last: workers may still be using it in their `close`.
        workers = [pod for pod in pods if pod.role != "channel"]
        for part in (workers, [pod for pod in pods if pod.role == "channel"]):
            for pod in part:
                pod.terminate()
            await self._pods.wait_ended(part, END_SECONDS)
        await self._pods.kill(pods)

    def _run(self, work: "Coroutine[Any, Any, Value]") -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
