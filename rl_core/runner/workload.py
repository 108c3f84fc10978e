"""Measures utilization: for how long each rollout was busy or starved, and for how long the trainer waited for prompt groups.

    a rollout is busy      while it has leased a prompt group, of training or of validation
                 starved   while it has leased none, its poll for groups is open, and no weights are in transit
                 neither   while it receives weights, starts, or has no poll open
    the trainer  starved   while it waits for the groups of its step
    queue of the rollouts  groups that could be leased and are not
    queue of the actor     finished groups that are deferred

The dispatcher reports each lease, the end of each lease, and each poll; the loop reports its own waits. The autoscaler reads the results.
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
"""Shortest window of `/status.workload`, in seconds."""
STEPS_IN_WINDOW = 4
"""The window covers at least this number of steps: on policy a rollout is busy in one part of a step and starved in the other."""
MARKS_IN_WINDOW = 12


@dataclass(slots=True)
class _Rollout:
    """One rollout process."""

    since: float
    """Clock, in seconds, up to which its times are counted."""
    polling: bool = False
    tokens: set[str] = field(default_factory=set)
    """Tokens of the leases that it holds."""
    groups: int = 0
    """Number of training groups that it has finished."""
    busy: float = 0.0
    starved: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """All sums at one time."""

    at: float
    rollouts: Mapping[Identity, tuple[float, float]]
    """Seconds (busy, starved)."""
    trainer: float
    starved_in_training: float
    """Seconds, summed over the rollouts."""
    backlog: float
    ready: float
    """Number of groups in the two queues, integrated over time: groups times seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Times and mean queue lengths between two marks."""

    seconds: float
    rollouts: Mapping[Identity, tuple[float, float]]
    """Seconds (busy, starved) of each rollout that is still a member."""
    trainer_starved: float
    """Seconds."""
    starved_in_training: float
    """Mean seconds for which a rollout was starved while the trainer did not wait."""
    rollout_queue: float
    actor_queue: float
    """Mean numbers of groups."""

    def mean_busy(self) -> float:
        """Return the mean seconds for which a rollout was busy; 0 without rollouts."""
        return sum(busy for busy, _ in self.rollouts.values()) / max(len(self.rollouts), 1)

    def mean_starved(self) -> float:
        """Return the mean seconds for which a rollout was starved; 0 without rollouts."""
        return sum(starved for _, starved in self.rollouts.values()) / max(len(self.rollouts), 1)

    def metrics(self) -> dict[str, float]:
        """Return the utilization metrics of a step's line in metrics.jsonl."""
        return {
            "rollout/starved_seconds": self.mean_starved(),
            "actor/starved_seconds": self.trainer_starved,
            "rollout/queue_depth": self.rollout_queue,
            "actor/queue_depth": self.actor_queue,
        }


class Workload:
    """Sums the busy and starved times of rollouts and trainer, and the lengths of the two queues. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._rollouts: dict[Identity, _Rollout] = {}
        self._holder: dict[str, Identity] = {}
        """Rollout that holds the lease, by lease token."""
        self._weights_in_transit = False
        self._trainer_waiting = False
        self._backlog = self._ready = 0
        """Groups in the queue of the rollouts and in that of the actor."""
        self._last_update = clock()
        """Clock, in seconds, up to which the sums below are counted."""
        self._starved_in_training = 0.0
        """Seconds for which rollouts were starved while the trainer did not wait, summed over the rollouts."""
        self._trainer = self._backlog_sum = self._ready_sum = 0.0
        self._step: _Mark | None = None
        self._step_seconds = 0.0
        self._marks: deque[_Mark] = deque()

    # --- groups ----------------------------------------------------------------------------------------------------

    def begun(self, rollout: Identity, token: str) -> None:
        """Record that a rollout was granted a lease."""
        with self._lock:
            self._settled(rollout).tokens.add(token)
            self._holder[token] = rollout

    def ended(self, token: str) -> None:
        """Record that a lease has ended without a finished group. An unknown token is ignored."""
        with self._lock:
            self._end(token)

    def finished(self, token: str) -> None:
        """Record that a rollout has finished the group of this lease."""
        with self._lock:
            if (holder := self._holder.get(token)) is not None:
                self._rollouts[holder].groups += 1
                self._end(token)

    def _end(self, token: str) -> None:
        holder = self._holder.pop(token, None)
        if holder is not None:
            self._settled(holder).tokens.discard(token)

    # --- rollouts, trainer, queues ---------------------------------------------------------------------------------

    def set_polling(self, rollout: Identity, polling: bool) -> None:
        """Record whether a live rollout has an open poll for groups."""
        with self._lock:
            state = self._rollouts.get(rollout)
            if (state.polling if state is not None else False) != polling:
                self._settled(rollout).polling = polling

    def queues(self, *, backlog: int, ready: int) -> None:
        """Record the lengths of the queues: `backlog` groups could be leased and are not, `ready` finished groups are deferred."""
        with self._lock:
            if (backlog, ready) != (self._backlog, self._ready):
                self._count()
                self._backlog, self._ready = backlog, ready

    def forget(self, rollout: Identity) -> None:
        """Remove a rollout that is lost or leaves. The window starts again, because its figures are of another number of rollouts."""
        with self._lock:
            self._forget(rollout)

    def _forget(self, rollout: Identity) -> None:
        state = self._rollouts.pop(rollout, None)
        if state is not None:
            for token in state.tokens:
                del self._holder[token]
            self._marks.clear()

    @contextmanager
    def weights_in_transit(self) -> Iterator[None]:
        """Count no rollout as starved while the block runs: weights are being published, and rollouts wait for these."""
        self._set_weights_in_transit(True)
        try:
            yield
        finally:
            self._set_weights_in_transit(False)

    def _set_weights_in_transit(self, travel: bool) -> None:
        with self._lock:
            for rollout in self._rollouts:
                self._settled(rollout)
            self._weights_in_transit = travel

    @contextmanager
    def trainer_waiting(self) -> Iterator[None]:
        """Count the block as time in which the trainer waits for groups."""
        self._set_trainer_waiting(True)
        try:
            yield
        finally:
            self._set_trainer_waiting(False)

    def _set_trainer_waiting(self, waiting: bool) -> None:
        with self._lock:
            for rollout in self._rollouts:
                self._settled(rollout)
            self._count()
            self._trainer_waiting = waiting

    # --- reports ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Mark the start of a step. The window starts with the first step."""
        with self._lock:
            if self._step is None:
                self._marks.clear()
            self._step = self._mark()

    def of_step(self) -> Usage:
        """Return the usage since the step began. Raises RuntimeError, a bug of the runner, if none has begun."""
        with self._lock:
            if self._step is None:
                raise RuntimeError("no step has begun; this is a bug of the runner")
            usage = self._since_mark(self._step)
            self._step_seconds = usage.seconds
            return usage

    def tick(self, is_live: Callable[[str, tuple[int, int]], bool]) -> None:
        """Remove rollouts that are not live, and advance the window. Called once a second."""
        with self._lock:
            for rollout in [rollout for rollout in self._rollouts if not is_live(*rollout)]:
                self._forget(rollout)
            now, marks, window = self._clock(), self._marks, self._window()
            if not marks or now - marks[-1].at >= window / MARKS_IN_WINDOW:
                marks.append(self._mark())
            while len(marks) > 1 and now - marks[1].at >= window:
                marks.popleft()

    def snapshot(self) -> dict[str, Any]:
        """Return `/status.workload`: fractions of the window's time, from 0 to 1, and the mean queue lengths in it."""
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
            "busy": share(usage.mean_busy()),
            "starved": share(usage.mean_starved()),
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
        state = self._rollouts.get(rollout)
        if state is None:
            state = self._rollouts[rollout] = _Rollout(since=now)
            self._marks.clear()
        if state.tokens:
            state.busy += now - state.since
        elif state.polling and not self._weights_in_transit:
            state.starved += now - state.since
            self._starved_in_training += 0.0 if self._trainer_waiting else now - state.since
        state.since = now
        return state

    def _count(self) -> None:
        """Count the trainer's seconds and the queues up to now, before one changes."""
        now = self._clock()
        seconds, self._last_update = now - self._last_update, now
        self._trainer += seconds if self._trainer_waiting else 0.0
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

    def _since_mark(self, mark: _Mark) -> Usage:
        now = self._mark()
        seconds = now.at - mark.at
        rollouts = {}
        for rollout, (busy, starved) in now.rollouts.items():
            was_busy, was_starved = mark.rollouts.get(rollout, (0.0, 0.0))
            rollouts[rollout] = (busy - was_busy, starved - was_starved)
        return Usage(
            seconds=seconds,
            rollouts=rollouts,
            trainer_starved=now.trainer - mark.trainer,
            starved_in_training=(now.starved_in_training - mark.starved_in_training) / max(len(rollouts), 1),
            rollout_queue=(now.backlog - mark.backlog) / seconds if seconds else float(self._backlog),
            actor_queue=(now.ready - mark.ready) / seconds if seconds else float(self._ready),
        )


def _rank(entry: tuple[Identity, Any]) -> tuple[int, Identity]:
    return int(entry[0][0].partition(":")[2]), entry[0]
