"""Starts and ends the pods of a local run, and makes sure that none of their processes is left behind.

All methods except `sweep` and `entries` run on the launcher's event loop. A killed supervisor cannot end its children, and these may have
left its process group. Leftover processes are therefore found by an environment variable that all processes of the run inherit.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_core.launch.local_plan import as_attempt
from rl_core.launch.local_pod import LocalPod
from rl_core.launch.registry import ProcessEntry, ProcessRegistry
from rl_core.launch.workspace import Workspace
from rl_core.plan.launch import PodPlan
from rl_core.workers import processes

logger = logging.getLogger(__name__)

KILL_SECONDS = 2.0
"""Seconds that a supervisor has to end its processes after its socket was closed, before it is killed itself."""
POD_SWEEP_SECONDS, LAST_SWEEP_SECONDS = 0.4, 10.0
"""Seconds to wait for killed leftover processes of a pod, and at the end of the run. Processes with much memory or a device end slowly."""


class LocalPods:
    """The pods of one run by name; only the newest start of each is kept."""

    def __init__(
        self,
        space: Workspace,
        *,
        environ: Mapping[str, str],
        on_end: Callable[[LocalPod], None],
        say: Callable[[str], None] = logger.warning,
        keep_logs: bool = True,
    ) -> None:
        """Start pods with the environment variables `environ`.

        `on_end` is called when a pod has ended and no process of it is left, `say` with a line for each process that failed and was started
        again in its pod. With `keep_logs` false pods write to standard error and not to the log files of `space`.
        """
        self._space = space
        self._run_mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._environ = {
            **environ,
            "RLJOB_OUTPUT": str(space.folder),
            "RLJOB_CURVE_DIR": str(space.key_folder),
            "RLJOB_HEALTH_PORT": "0",
            "RLJOB_HEALTH_HOST": "127.0.0.1",
            "RLJOB_LAUNCHER": self._run_mark,
        }
        self._on_end, self._say = on_end, say
        self._keep_logs = keep_logs
        self._pods: dict[str, LocalPod] = {}
        self._registry = ProcessRegistry(space.folder / "processes.json")

    def __iter__(self) -> Iterator[LocalPod]:
        return iter(list(self._pods.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._pods

    def __getitem__(self, name: str) -> LocalPod:
        return self._pods[name]

    def of_role(self, role: str) -> list[LocalPod]:
        """Return the pods of one role."""
        return [pod for pod in self if pod.role == role]

    def entries(self) -> list[ProcessEntry]:
        """Return the live processes, as in processes.json."""
        return self._registry.entries()

    def start(self, plan: PodPlan, **environ: str) -> None:
        """Start a pod, for the first time or anew; `environ` is for this start."""
        attempt = self._pods[plan.name].attempt + 1 if plan.name in self._pods else 0
        pod = LocalPod(
            as_attempt(plan, attempt),
            attempt=attempt,
            plan_file=self._space.plan_file(plan),
            log_file=self._space.log_file(plan) if self._keep_logs else None,
            environ={**self._environ, "RLJOB_POD": plan.name, **environ},
            on_event=self._note,
            on_end=self._ended,
        )
        self._pods[plan.name] = pod
        entry = ProcessEntry(role="supervisor", index=plan.index, rank=None, pid=pod.pid, pod=plan.name)
        self._registry.add(entry)

    async def wait_ended(self, pods: Sequence[LocalPod], seconds: float) -> None:
        """Return when all of `pods` have ended, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(pod.ended.wait() for pod in pods)), max(seconds, 0.0))

    async def kill(self, pods: Sequence[LocalPod]) -> None:
        """End `pods` now; return when they have ended."""
        for pod in pods:
            pod.kill()
        await self.wait_ended(pods, KILL_SECONDS)
        for pod in pods:
            if pod.running:
                processes.kill(pod.pid, signal.SIGKILL)
        await self.wait_ended(pods, KILL_SECONDS)

    def sweep(self, pod: str | None = None, *, seconds: float = POD_SWEEP_SECONDS) -> None:
        """Kill leftover processes of the run, or of one pod, which are found by their environment.

        Returns when none is left, or after `seconds`.
        """
        marks = [f"RLJOB_LAUNCHER={self._run_mark}", *([f"RLJOB_POD={pod}"] if pod else [])]
        processes.kill_with_environment(*marks, seconds=seconds)

    def _note(self, pod: LocalPod, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            kind = event.get("process", "worker")
            groups = {
                process.name: process.group for container in pod.plan.containers for process in container.processes
            }
            role = groups.get(event.get("name", ""), pod.role) if kind == "worker" else kind
            entry = ProcessEntry(
                role=role, index=pod.index, rank=event.get("rank"), pid=event["pid"], pod=pod.plan.name
            )
            self._registry.add(entry, parent=event.get("parent", pod.pid))
            if failure := pod.failures.pop(event.get("name", ""), ""):
                self._say(f"{failure}: started again")
        elif event["event"] == "ended":
            self._registry.remove(event["pid"])
            if event.get("code"):
                logger.info("pod %s: %s", pod.plan.name, event.get("reason", event))
                pod.failures[event.get("name", "")] = event.get("reason", "")

    def _ended(self, pod: LocalPod) -> None:
        self._registry.remove(pod.pid)
        self.sweep(pod.plan.name)
        self._on_end(pod)
