"""Detects that a run makes no progress and reports who waits for whom.

A stall is only reported here. The operator or the local launcher acts on it, by the rule `failurePolicy.stall`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.messages.members import WaitCause

REASON_BY_ROLE = {"rollout": "WaitingForRollout", "env": "WaitingForEnv", "actor": "WaitingForActor"}
REASON_BY_CAUSE = {WaitCause.CHANNEL_FULL: "ChannelFull", WaitCause.WEIGHTS: "WaitingForWeights"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One edge of the waits-for graph: `who` waits for `on` (a member, a role or a channel)."""

    who: str
    on: str
    what: str
    since_seconds: float
    cause: WaitCause | None = None
    """Set where the reason of a stall is not told by whom the wait is for."""

    def as_status(self) -> dict[str, Any]:
        """Return it as `/status` shows it."""
        return {"who": self.who, "on": self.on, "what": self.what, "seconds": round(self.since_seconds, 1)}


@dataclass(slots=True)
class StallDetector:
    """Watches the total of all progress counters; a total that does not change for `limit` seconds is a stall."""

    seconds: float | None
    """Limit from the job; None = max(300, 5 x median step)."""
    clock: Callable[[], float] = time.monotonic
    _seen: int = -1
    _last: float = field(default=0.0)
    _steps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = self.clock()

    def step_took(self, seconds: float) -> None:
        """Use the duration of a step in seconds for the default limit."""
        self._steps = [*self._steps[-99:], seconds]

    @property
    def limit(self) -> float:
        """Return the seconds without progress that count as a stall."""
        if self.seconds is not None:
            return self.seconds
        return max(300.0, 5 * statistics.median(self._steps)) if self._steps else 300.0

    def observe(self, progress: int) -> float:
        """Compare the total of progress counters with the last one; return the seconds since it changed."""
        now = self.clock()
        if progress != self._seen:
            self._seen, self._last = progress, now
        return now - self._last

    def reset(self) -> None:
        """Count from now on: a phase that has no stall limit began or ended."""
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
            "waits": [edge.as_status() for edge in edges],
        }


def explain(edges: list[Wait], missing_pods: list[str], present: Iterable[str] = ()) -> tuple[str, str]:
    """Return (reason, sentence) for a waits-for graph.

    A cycle is a Deadlock; otherwise the reason is the member at the end of a chain of waits, or, where each such member waits too, the
    cause that one of them declares.

    A group that somebody waits for ends a chain of waits unless each of its members that are `present` waits too: an idle rollout must
    not hide one that hangs.
    """
    if missing_pods:
        return "WaitingForPods", f"missing {', '.join(sorted(missing_pods))}"
    if cycle := find_cycle({e.who: e.on for e in edges}):
        return "Deadlock", " waits for ".join([*cycle, cycle[0]])
    waiting = {e.who for e in edges}
    silent = [name for name in present if name not in waiting]
    waiting |= {_role(e.who) for e in edges} - {_role(name) for name in silent}
    sentences = [f"{e.who} waits for {e.on} ({e.what}, {e.since_seconds:.0f} s)" for e in edges]
    text = "; ".join(
        [*(sentences or ["nobody declares a wait"]), *(f"{name} declares none" for name in silent if sentences)]
    )
    # A member that is waited for and declares nothing is the reason. Others may wait for weights or for room meanwhile.
    for edge in edges:
        if edge.cause is None and edge.on not in waiting and _role(edge.on) in REASON_BY_ROLE:
            return REASON_BY_ROLE[_role(edge.on)], text
    for cause, reason in REASON_BY_CAUSE.items():
        if any(edge.cause is cause for edge in edges):
            return reason, text
    return "WaitingForActor", text


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
