"""Measures who works and who waits: how long each rollout held groups or could get none, and how long the trainer waited for groups.

    a rollout is busy      while it holds a group, of training or of validation
                 starved   while it holds none, its question for groups is open, and no weights travel: no lease is admissible
                 neither   while it takes weights, starts, or does not ask
    the trainer  starved   while it waits for the groups of its step
    queue of the rollouts  groups that may be given out and that no rollout takes
    queue of the actor     finished groups that wait for the trainer

The dispatcher reports each lease, each end of one and each poll; the loop reports its own waits. Nothing here decides anything.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_core.runner.roster import Identity

SHORTEST_WINDOW = 60.0
"""Seconds that the shares in `/status` are taken over, at least."""
STEPS_IN_WINDOW = 4
"""A window holds at least so many of the last step: on policy a rollout works in one part of a step and waits in the other."""
MARKS_IN_WINDOW = 12


@dataclass(slots=True)
class _Rollout:
    """One rollout process."""

    since: float
    """Up to when its seconds are counted."""
    asks: bool = False
    tokens: set[str] = field(default_factory=set)
    """Leases that it holds."""
    groups: int = 0
    """Groups of training that it finished."""
    busy: float = 0.0
    starved: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """All sums at one moment."""

    at: float
    rollouts: Mapping[Identity, tuple[float, float]]
    """Seconds (busy, starved)."""
    trainer: float
    starved_in_training: float
    """Rollout seconds."""
    backlog: float
    ready: float
    """Group seconds in the two queues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What happened between two moments."""

    seconds: float
    rollouts: Mapping[Identity, tuple[float, float]]
    """Seconds (busy, starved) of each rollout that is still here."""
    trainer_starved: float
    """Seconds."""
    starved_in_training: float
    """Seconds in which a rollout starved while the trainer did not wait, on average."""
    rollout_queue: float
    actor_queue: float
    """Mean numbers of groups."""

    def mean(self, part: int) -> float:
        """Return the seconds busy (0) or starved (1) of a rollout on average."""
        return sum(seconds[part] for seconds in self.rollouts.values()) / max(len(self.rollouts), 1)

    def metrics(self) -> dict[str, float]:
        """Return the metrics that a step's line in metrics.jsonl has of it."""
        return {
            "rollout/starved_seconds": self.mean(1),
            "actor/starved_seconds": self.trainer_starved,
            "rollout/queue_depth": self.rollout_queue,
            "actor/queue_depth": self.actor_queue,
        }


class Workload:
    """Sums of the present rollouts, of the trainer and of the two queues. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._rollouts: dict[Identity, _Rollout] = {}
        self._holder: dict[str, Identity] = {}
        """Rollout that generates, by lease token."""
        self._weights_travel = False
        self._trainer_waits = False
        self._backlog = self._ready = 0
        """Groups in the queue of the rollouts and in that of the actor."""
        self._since = clock()
        """Up to when the sums below are counted."""
        self._starved_in_training = 0.0
        """Seconds of all rollouts that starved while the trainer did not wait."""
        self._trainer = self._backlog_sum = self._ready_sum = 0.0
        self._step: _Mark | None = None
        self._step_seconds = 0.0
        self._marks: deque[_Mark] = deque()

    # --- groups ----------------------------------------------------------------------------------------------------

    def begun(self, rollout: Identity, token: str) -> None:
        """Note that a rollout was given a lease."""
        with self._lock:
            self._settled(rollout).tokens.add(token)
            self._holder[token] = rollout

    def ended(self, token: str) -> None:
        """Note that nobody generates the group of this lease; without effect for a lease that nobody held."""
        with self._lock:
            self._end(token)

    def finished(self, token: str) -> None:
        """Note that a rollout has finished the group of this lease."""
        with self._lock:
            if (holder := self._holder.get(token)) is not None:
                self._rollouts[holder].groups += 1
                self._end(token)

    def _end(self, token: str) -> None:
        holder = self._holder.pop(token, None)
        if holder is not None:
            self._settled(holder).tokens.discard(token)

    # --- rollouts, trainer, queues ---------------------------------------------------------------------------------

    def asks(self, rollout: Identity, asks: bool) -> None:
        """Note whether a poll of a live rollout for groups is open."""
        with self._lock:
            known = self._rollouts.get(rollout)
            if (known.asks if known is not None else False) != asks:
                self._settled(rollout).asks = asks

    def queues(self, *, backlog: int, ready: int) -> None:
        """Note how many groups could be leased and are not, and how many finished groups wait for the trainer."""
        with self._lock:
            if (backlog, ready) != (self._backlog, self._ready):
                self._count()
                self._backlog, self._ready = backlog, ready

    def gone(self, rollout: Identity) -> None:
        """Forget a rollout that is lost or leaves; the window begins anew, as its numbers are those of another size."""
        with self._lock:
            self._forget(rollout)

    def _forget(self, rollout: Identity) -> None:
        known = self._rollouts.pop(rollout, None)
        if known is not None:
            for token in known.tokens:
                del self._holder[token]
            self._marks.clear()

    @contextmanager
    def weights_travel(self) -> Iterator[None]:
        """Count no wait in the block as one for groups: a version is on its way, and who waits then waits for it."""
        self._set_weights_travel(True)
        try:
            yield
        finally:
            self._set_weights_travel(False)

    def _set_weights_travel(self, travel: bool) -> None:
        with self._lock:
            for rollout in self._rollouts:
                self._settled(rollout)
            self._weights_travel = travel

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """Count the block as the trainer's wait for groups."""
        self._set_trainer_waits(True)
        try:
            yield
        finally:
            self._set_trainer_waits(False)

    def _set_trainer_waits(self, waits: bool) -> None:
        with self._lock:
            for rollout in self._rollouts:
                self._settled(rollout)
            self._count()
            self._trainer_waits = waits

    # --- reports ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Count a step from here; the window begins with the first."""
        with self._lock:
            if self._step is None:
                self._marks.clear()
            self._step = self._mark()

    def of_step(self) -> Usage:
        """Return what happened since the step began."""
        with self._lock:
            if self._step is None:
                raise RuntimeError("no step has begun; this is a bug of the runner")
            usage = self._since_mark(self._step)
            self._step_seconds = usage.seconds
            return usage

    def tick(self, is_live: Callable[[str, tuple[int, int]], bool]) -> None:
        """Forget rollouts that are not live, and move the window on. Called once a second."""
        with self._lock:
            for rollout in [rollout for rollout in self._rollouts if not is_live(*rollout)]:
                self._forget(rollout)
            now, marks, window = self._clock(), self._marks, self._window()
            if not marks or now - marks[-1].at >= window / MARKS_IN_WINDOW:
                marks.append(self._mark())
            while len(marks) > 1 and now - marks[1].at >= window:
                marks.popleft()

    def snapshot(self) -> dict[str, Any]:
        """Return `/status.workload`: shares of the window's seconds, and the queues' mean lengths in it."""
        with self._lock:
            usage = self._since_mark(self._marks[0] if self._marks else self._mark())
            groups = {rollout: self._rollouts[rollout].groups for rollout in usage.rollouts}
            full = usage.seconds >= self._window()
        seconds = max(usage.seconds, 1e-9)

        def share(value: float) -> float:
            return round(min(value / seconds, 1.0), 4)

        return {
            "seconds": round(usage.seconds, 1),
            "full": full,
            "busy": share(usage.mean(0)),
            "starved": share(usage.mean(1)),
            "starvedInTraining": share(usage.starved_in_training),
            "actorStarved": share(usage.trainer_starved),
            "rolloutQueue": round(usage.rollout_queue, 2),
            "actorQueue": round(usage.actor_queue, 2),
            "rollouts": [
                {"name": rollout[0], "busy": share(busy), "starved": share(starved), "groups": groups[rollout]}
                for rollout, (busy, starved) in sorted(usage.rollouts.items(), key=_rank)
            ],
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _window(self) -> float:
        return max(SHORTEST_WINDOW, STEPS_IN_WINDOW * self._step_seconds)

    def _settled(self, rollout: Identity) -> _Rollout:
        """Return a rollout with its seconds counted up to now, before its state changes."""
        now = self._clock()
        known = self._rollouts.get(rollout)
        if known is None:
            known = self._rollouts[rollout] = _Rollout(since=now)
            self._marks.clear()
        if known.tokens:
            known.busy += now - known.since
        elif known.asks and not self._weights_travel:
            known.starved += now - known.since
            self._starved_in_training += 0.0 if self._trainer_waits else now - known.since
        known.since = now
        return known

    def _count(self) -> None:
        """Count the trainer's seconds and the queues up to now, before one changes."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._trainer += seconds if self._trainer_waits else 0.0
        self._backlog_sum += seconds * self._backlog
        self._ready_sum += seconds * self._ready

    def _mark(self) -> _Mark:
        self._count()
        settled = {rollout: self._settled(rollout) for rollout in self._rollouts}
        return _Mark(
            at=self._clock(),
            rollouts={rollout: (sums.busy, sums.starved) for rollout, sums in settled.items()},
            trainer=self._trainer,
            starved_in_training=self._starved_in_training,
            backlog=self._backlog_sum,
            ready=self._ready_sum,
        )

    def _since_mark(self, then: _Mark) -> Usage:
        now = self._mark()
        seconds = now.at - then.at
        rollouts = {}
        for rollout, (busy, starved) in now.rollouts.items():
            was_busy, was_starved = then.rollouts.get(rollout, (0.0, 0.0))
            rollouts[rollout] = (busy - was_busy, starved - was_starved)
        return Usage(
            seconds=seconds,
            rollouts=rollouts,
            trainer_starved=now.trainer - then.trainer,
            starved_in_training=(now.starved_in_training - then.starved_in_training) / max(len(rollouts), 1),
            rollout_queue=(now.backlog - then.backlog) / seconds if seconds else float(self._backlog),
            actor_queue=(now.ready - then.ready) / seconds if seconds else float(self._ready),
        )


def _rank(of: tuple[Identity, Any]) -> tuple[int, Identity]:
    return int(of[0][0].partition(":")[2]), of[0]
