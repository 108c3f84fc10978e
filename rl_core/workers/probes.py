"""What a pod answers to probes: is it alive, is it ready, how are its processes. Pure reads of the supervisor's tables."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rl_core.workers import processes
from rl_core.workers.child import Child

if TYPE_CHECKING:
    from rl_core.plan.launch import PodPlan, ProcessPlan

SILENCE = 60.0
"""A child whose I/O thread gave no sign for so long makes /healthz answer 503."""
FIRST_SIGN = 600.0
"""The same for a worker that gave none yet: its imports come before its I/O thread, from a slow volume at times."""
_REGISTERED = ("joining", "constructing", "ready", "updating", "serving")


def kind_of(process: "ProcessPlan") -> str:
    """Return runner, channel or worker."""
    return process.group if process.group in ("runner", "channel") else "worker"


class Probes:
    """The pages of the health server, over the supervisor's children by process name."""

    def __init__(
        self,
        pod: "PodPlan",
        plans: "Sequence[ProcessPlan]",
        children: Mapping[str, Child],
        restarts: Mapping[str, int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod, self._plans, self._children, self._restarts, self._clock = pod, plans, children, restarts, clock

    def healthz(self) -> tuple[int, str]:
        """Return 503 naming the children whose I/O thread has been silent for SILENCE seconds; a declared wait is healthy.

        Runner and channel server give no signs; the workers notice their end.
        """
        now = self._clock()
        silent = []
        for process in self._plans:
            child = self._children.get(process.name)
            if child is None or not child.running or kind_of(process) != "worker":
                continue
            since, limit = (child.started, FIRST_SIGN) if child.last_alive is None else (child.last_alive, SILENCE)
            if now - since > limit:
                silent.append(f"{child.name} for {now - since:.0f} s")
        return (503, f"no sign of life from {', '.join(silent)}\n") if silent else (200, "ok\n")

    def readyz(self) -> tuple[int, str]:
        """Return 200 when all children run and are registered with the hub (rollouts: serving)."""
        wanted = ("serving",) if self._pod.role == "rollout" else _REGISTERED
        waiting = []
        for process in self._plans:
            child = self._children.get(process.name)
            if child is None or not child.running:
                waiting.append(f"{process.name}: not running")
            elif kind_of(process) == "worker" and child.state not in wanted:
                waiting.append(f"{process.name}: {child.state or 'starting'}")
        return (503, "waiting for " + ", ".join(waiting) + "\n") if waiting else (200, "ready\n")

    def metrics(self) -> tuple[int, str]:
        """Return the children's state in the Prometheus text format."""
        rows: dict[str, list[str]] = {"up": [], "restarts_total": [], "resident_memory_bytes": []}
        for name, child in self._children.items():
            label = f'{{process="{name}",pod="{self._pod.name}"}}'
            rows["up"].append(f"rljob_process_up{label} {int(child.running)}")
            rows["restarts_total"].append(f"rljob_process_restarts_total{label} {self._restarts.get(name, 0)}")
            memory = processes.memory_bytes(child.pid) if child.running else 0
            rows["resident_memory_bytes"].append(f"rljob_process_resident_memory_bytes{label} {memory}")
        lines = []
        for name, samples in rows.items():
            lines.append(f"# TYPE rljob_process_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += samples
        return 200, "\n".join(lines) + "\n"
