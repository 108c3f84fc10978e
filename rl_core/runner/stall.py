"""Detects that a run makes no progress, and reports which member waits for which.

A stall is only reported here. The operator or the local launcher acts on it, by the rule `failurePolicy.stall`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.messages.members import WaitCause
from rl_core.plan.groups import ACTOR, BUILT_IN

REASONS: Mapping[str, str] = {name: kind.stall_reason for name, kind in BUILT_IN.items()}
"""Reason of a stall in which the run waits for a built-in group."""
REASON_BY_CAUSE = {WaitCause.CHANNEL_FULL: "ChannelFull", WaitCause.WEIGHTS: "WaitingForWeights"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One edge of the waits-for graph: member `who` waits for `on`, the name of a member, a worker group or a channel, or DISK_SPACE."""

    who: str
    on: str
    what: str
    since_seconds: float
    cause: WaitCause | None = None
    """Cause that the waiting member reports: a full channel, or missing weights. None if `on` explains the wait."""

    def as_status(self) -> dict[str, Any]:
        """Return it as `/status` shows it."""
        return {"who": self.who, "on": self.on, "what": self.what, "seconds": round(self.since_seconds, 1)}


@dataclass(slots=True)
class StallDetector:
    """Watches the sum of all progress counters. A stall is a sum that has not changed for `limit` seconds."""

    seconds: float | None
    """failurePolicy.stall.seconds of the job; None means the larger of 300 s and 5 times the median step time."""
    clock: Callable[[], float] = time.monotonic
    reasons: Mapping[str, str] = field(default_factory=lambda: REASONS)
    """Reason of a stall by the group of the job that the run waits for."""
    program_place: Callable[[], str] = str
    """Returns the line of its own code that the user's program runs; "" if there is none."""
    _last_progress: int = -1
    _last_change: float = field(default=0.0)
    _steps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last_change = self.clock()

    def step_took(self, seconds: float) -> None:
        """Add the duration of a step, in seconds, to those of the default limit; the last 100 are used."""
        self._steps = [*self._steps[-99:], seconds]

    @property
    def limit(self) -> float:
        """Seconds without progress after which the run is stalled."""
        if self.seconds is not None:
            return self.seconds
        return max(300.0, 5 * statistics.median(self._steps)) if self._steps else 300.0

    def observe(self, progress: int) -> float:
        """Record the sum of the progress counters; return the seconds since it last changed."""
        now = self.clock()
        if progress != self._last_progress:
            self._last_progress, self._last_change = progress, now
        return now - self._last_change

    def reset(self) -> None:
        """Start the time without progress at 0. Called when a phase without stall detection begins or ends."""
        self._last_change = self.clock()

    def report(
        self, progress: int, waits: Iterable[Wait], *, missing_pods: Iterable[str] = (), present: Iterable[str] = ()
    ) -> dict[str, Any] | None:
        """Return the stall for `/status`, or None while there is progress.

        `progress` is the sum of the counters, `waits` the reported waits, `missing_pods` the pods that the job asks for and lacks, and
        `present` the names of members that could work.
        """
        silent = self.observe(progress)
        if silent < self.limit:
            return None
        edges = list(waits)
        reason, message = explain(edges, list(missing_pods), present, self.reasons, self.program_place())
        return {
            "reason": reason,
            "message": f"no progress for {silent:.0f} s (limit {self.limit:.0f} s): {message}",
            "since": silent,
            "waits": [edge.as_status() for edge in edges],
        }


def explain(
    edges: list[Wait],
    missing_pods: list[str],
    present: Iterable[str] = (),
    reasons: Mapping[str, str] = REASONS,
    program_place: str = "",
) -> tuple[str, str]:
    """Return (reason, message) for a waits-for graph.

    Missing pods are the reason WaitingForPods, and a cycle of waits is a Deadlock. Otherwise the reason is a member or worker group that
    somebody waits for and that does not wait itself, for example WaitingForRollout. If there is none, the reason is the cause that a
    waiting member reports, ChannelFull or WaitingForWeights.

    A worker group counts as waiting only if each of its `present` members waits. Example: the runner waits for the rollouts, one rollout
    waits for weights, and another one hangs without reporting a wait. The reason is then WaitingForRollout.

    If the runner reports no wait, the message names `program_place`, the line at which the user's program may hang.
    """
    if missing_pods:
        return "WaitingForPods", f"missing {', '.join(sorted(missing_pods))}"
    if cycle := find_cycle({e.who: e.on for e in edges}):
        return "Deadlock", " waits for ".join([*cycle, cycle[0]])
    waiting = {e.who for e in edges}
    silent = [name for name in present if name not in waiting]
    waiting |= {_role(e.who) for e in edges} - {_role(name) for name in silent}
    sentences = [f"{e.who} waits for {e.on} ({e.what}, {e.since_seconds:.0f} s)" for e in edges]
    sentences = [*(sentences or ["nobody declares a wait"]), *(f"{name} declares none" for name in silent if sentences)]
    if program_place and "runner" not in waiting:
        sentences.append(f"the program runs {program_place}")
    text = "; ".join(sentences)
    # A member that is waited for and declares nothing is the reason. Others may wait for weights or for room meanwhile.
    for edge in edges:
        if edge.cause is None and edge.on not in waiting and _role(edge.on) in reasons:
            return reasons[_role(edge.on)], text
    for cause, reason in REASON_BY_CAUSE.items():
        if any(edge.cause is cause for edge in edges):
            return reason, text
    return reasons[ACTOR], text


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
