"""The health pages of a pod: whether its processes are alive, whether they are ready, and metrics about them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rl_core.workers import processes
from rl_core.workers.child import Child

if TYPE_CHECKING:
    from rl_core.plan.launch import PodPlan, ProcessPlan

SILENCE = 60.0
"""Seconds after the last `alive` event of a worker process from which /healthz answers 503."""
FIRST_SIGN = 600.0
"""Seconds that a worker process may take until its first `alive` event. Its imports may be slow to load from a network volume."""
_REGISTERED = ("joining", "constructing", "ready", "updating", "serving")


def kind_of(process: "ProcessPlan") -> str:
    """Return "runner", "channel" or "worker"."""
    return process.group if process.group in ("runner", "channel") else "worker"


class Probes:
    """The health pages of one pod. Each method returns an HTTP status code and a text."""

    def __init__(
        self,
        pod: "PodPlan",
        plans: "Sequence[ProcessPlan]",
        children: Mapping[str, Child],
        restarts: Mapping[str, int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the tables of the supervisor, which it keeps up to date.

        `children` holds the latest child and `restarts` the number of restarts of each process, both by process name. `clock` returns
        seconds.
        """
        self._pod, self._plans, self._children, self._restarts, self._clock = pod, plans, children, restarts, clock

    def healthz(self) -> tuple[int, str]:
        """Return 503 with the names of worker processes that have sent no `alive` event for SILENCE seconds, else 200.

        The events come from the control loop of a process, so a worker that is busy or waits is still healthy. Runner and channel server
        send no such events; if they hang, the workers notice.
        """
        now = self._clock()
        silent = []
        for process in self._plans:
            child = self._children.get(process.name)
            if child is None or not child.running or kind_of(process) != "worker":
                continue
            last_sign, limit = (child.started, FIRST_SIGN) if child.last_alive is None else (child.last_alive, SILENCE)
            if now - last_sign > limit:
                silent.append(f"{child.name} for {now - last_sign:.0f} s")
        return (503, f"no sign of life from {', '.join(silent)}\n") if silent else (200, "ok\n")

    def readyz(self) -> tuple[int, str]:
        """Return 200 when all processes run and all workers are registered with the hub, else 503 with those that are missing.

        Rollout workers must also serve the policy.
        """
        ready_states = ("serving",) if self._pod.role == "rollout" else _REGISTERED
        waiting = []
        for process in self._plans:
            child = self._children.get(process.name)
            if child is None or not child.running:
                waiting.append(f"{process.name}: not running")
            elif kind_of(process) == "worker" and child.state not in ready_states:
                waiting.append(f"{process.name}: {child.state or 'starting'}")
        return (503, "waiting for " + ", ".join(waiting) + "\n") if waiting else (200, "ready\n")

    def metrics(self) -> tuple[int, str]:
        """Return the state, the restarts and the resident memory of each process in the Prometheus text format."""
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
