"""Finds out that nothing makes progress, and who waits for whom.

The runner feeds heartbeats in; a stall is only reported here. Who acts on it: the operator or the local launcher.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

REASON_BY_ROLE = {"rollout": "WaitingForRollout", "env": "WaitingForEnv", "actor": "WaitingForActor"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One edge of the waits-for graph: `who` waits for `on` (a member, a role or a channel)."""

    who: str
    on: str
    what: str
    since_seconds: float


@dataclass(slots=True)
class StallDetector:
    """Watches a total of progress counters; silent for too long = a stall."""

    seconds: float | None
    """Bound from the job; None = max(300, 5 x median step)."""
    clock: Callable[[], float] = time.monotonic
    _seen: int = -1
    _last: float = field(default=0.0)
    _steps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = self.clock()

    def step_took(self, seconds: float) -> None:
        """Remember the duration of a step, for the default bound."""
        self._steps = [*self._steps[-99:], seconds]

    @property
    def limit(self) -> float:
        """Return the silence in seconds that counts as a stall."""
        if self.seconds is not None:
            return self.seconds
        return max(300.0, 5 * statistics.median(self._steps)) if self._steps else 300.0

    def observe(self, progress: int) -> float:
        """Take the present total of progress counters; return the seconds since it last moved."""
        now = self.clock()
        if progress != self._seen:
            self._seen, self._last = progress, now
        return now - self._last

    def reset(self) -> None:
        """Count from now: a declared wait (missing pods) began or ended."""
        self._last = self.clock()

    def report(
        self, progress: int, waits: Iterable[Wait], *, missing_pods: Iterable[str] = (), present: Iterable[str] = ()
    ) -> dict[str, Any] | None:
        """Return the stall for `/status`, or None while there is progress; `present` are the members that could work."""
        silent = self.observe(progress)
        if silent < self.limit:
            return None
        edges = list(waits)
        reason, message = explain(edges, list(missing_pods), present)
        return {
            "reason": reason,
            "message": f"no progress for {silent:.0f} s (limit {self.limit:.0f} s): {message}",
            "since": silent,
            "waits": [{"who": e.who, "on": e.on, "what": e.what, "seconds": round(e.since_seconds, 1)} for e in edges],
        }


def explain(edges: list[Wait], missing_pods: list[str], present: Iterable[str] = ()) -> tuple[str, str]:
    """Return (reason, sentence) for a waits-for graph: a cycle is a Deadlock, otherwise its sinks are told.

    A role that somebody waits for is a sink unless its members wait too, each of those that are `present`: an idle rollout must not hide
    one that hangs.
    """
    if missing_pods:
        return "WaitingForPods", f"missing {', '.join(sorted(missing_pods))}"
    if cycle := find_cycle({e.who: e.on for e in edges}):
        return "Deadlock", " waits for ".join([*cycle, cycle[0]])
    waiting = {e.who for e in edges}
    silent = [name for name in present if name not in waiting]
    waiting |= {_role(e.who) for e in edges} - {_role(name) for name in silent}
    sentences = [f"{e.who} waits for {e.on} ({e.what}, {e.since_seconds:.0f} s)" for e in edges]
    told = "; ".join(
        [*(sentences or ["nobody declares a wait"]), *(f"{name} declares none" for name in silent if sentences)]
    )
    sinks = [e for e in edges if e.on not in waiting]
    if any("full" in e.what for e in sinks):
        return "ChannelFull", told
    if any("weight" in e.what for e in sinks):
        return "WaitingForWeights", told
    for sink in sinks:
        if _role(sink.on) in REASON_BY_ROLE:
            return REASON_BY_ROLE[_role(sink.on)], told
    return "WaitingForActor", told


def _role(name: str) -> str:
    return name.partition(":")[0]


def find_cycle(waits_for: Mapping[str, str]) -> list[str]:
    """Return the members of a cycle in `waits_for` in order, or an empty list."""
    for start in waits_for:
        path: list[str] = []
        node = start
        while node in waits_for and node not in path:
            path.append(node)
            node = waits_for[node]
        if node in path:
            return path[path.index(node) :]
    return []
