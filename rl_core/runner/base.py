"""What every program has in common: bring-up, its end, changes of the spec, the rules over a step's numbers. A program adds the loop.

The runner never imports torch or the model: it moves handles and numbers.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_core.plan.failure_rules import tripped
from rl_core.runner.changes import differences
from rl_core.runner.parts import Parts
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopKind, Stopped
from rl_core.runner.streaks import Streaks
from rl_core.runner.trace import Span

logger = logging.getLogger(__name__)
RESUMABLE = frozenset({"Suspended", "Interrupted"})
"""Ends after which the run is to be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended."""

    status: str
    """Finished, or when it was asked to end early Stopped, Suspended or Interrupted."""
    step: int
    version: int
    seconds: float
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(slots=True)
class StepTimers:
    """Seconds per part of one step, and the parts as the trace shows them."""

    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    """Parts that ended and were not taken yet."""

    def next_step(self, carried: str) -> "StepTimers":
        """Return timers for the next step, with what was measured of the part `carried` after this one was logged."""
        return StepTimers({k: v for k, v in self.seconds.items() if k == f"time/{carried}"}, self.spans)

    def take_spans(self) -> list[Span]:
        """Return the parts that ended since the last call."""
        taken, self.spans = self.spans, []
        return taken

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `time/<name>`."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + ended - began
            self.spans.append(Span(name, began, ended))


class Runner(ABC):
    """Owns a loop over parts that it is handed.

    Stops and changes of the spec reach the loop where it calls `handle_requests`: between steps, and between two looks of a wait for members. Actors
    compute nothing at either place, so a spec may change there.
    """

    def __init__(self, parts: Parts) -> None:
        """Run with `parts`; the program takes from them what its loop uses."""
        self.parts = parts
        self.actor, self.progress, self.stops, self.board = parts.actor, parts.progress, parts.stops, parts.board
        self.applied, self.saving, self.schedule = parts.applied, parts.saving, parts.schedule
        self.timers = StepTimers()
        self._streaks = Streaks(parts.job.spec.failure_policy)

    @abstractmethod
    def loop(self) -> None:
        """Run step after step until the last; Stopped leaves it."""

    def evaluate(self) -> dict[str, float]:
        """Measure the present weights; a program without validation has nothing to measure."""
        return {}

    def run(self) -> RunSummary:
        """Run to the last step, or to a stop request; save, export and report in both cases."""
        began = time.monotonic()
        self.parts.trackers.log_config(self.parts.job.model_dump(mode="json", by_alias=True))
        status = "Finished"
        try:
            self.init_workers()
            self.loop()
        except Stopped as stop:
            status = self.ended_early()
            logger.info("stopping after step %s: %s", self.progress.step, stop)
        if self.parts.startup.loaded:  # before, there are no weights to save
            with self.board.during(Phase.CHECKPOINTING):
                self._finish(resumable=status in RESUMABLE)
        accuracy = self.progress.accuracy
        return RunSummary(
            status=status,
            step=self.progress.step,
            version=self.progress.version,
            seconds=time.monotonic() - began,
            accuracy_before=accuracy[0] if accuracy else None,
            accuracy_after=accuracy[-1] if accuracy else None,
        )

    def init_workers(self) -> None:
        """Bring every role up, resume if asked, publish the starting weights."""
        self.parts.startup.run(at=self.handle_requests)

    def save_checkpoint(self) -> None:
        """Publish a checkpoint of the last finished step, unless it exists."""
        self.saving.save()

    def status(self) -> dict[str, Any]:
        """Return `/status`."""
        return self.parts.status()

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Ask the run to end; from any thread, but not from a signal's handler."""
        self.stops.stop(reason, kind)

    def close(self) -> None:
        """Stop background work."""
        self.parts.close()

    # --- the point of the loop -------------------------------------------------------------------------------------

    def handle_requests(self) -> None:
        """Leave if the run was asked to end; apply what `PUT /control` brought."""
        self.stops.check()
        self._apply_changes()

    def _apply_changes(self) -> None:
        if not self.parts.startup.loaded:
            return
        before = self.applied.spec
        change = self.applied.take()
        if change is None:
            return
        spec = change.spec
        rate, steps = spec.actor.optimizer.learning_rate, spec.algorithm.steps
        if (rate, steps) != (before.actor.optimizer.learning_rate, before.algorithm.steps):
            self.stops.wait(self.actor.set_schedule(rate, steps), spec.runtime.deadlines.rpc)
        self.parts.checkpoints.adopt(spec)
        self.parts.dispatcher.adopt(spec.algorithm)
        self.board.adopt(spec, change.generation)
        old, new = (one.model_dump(mode="json", by_alias=True) for one in (before, spec))
        changed = ", ".join(path for path, _, _ in differences(old, new)) or "no change here"
        logger.info("generation %s of the job is applied: %s", change.generation, changed)

    # --- what a step's numbers and an early end mean ------------------------------------------------------------------

    def watch_numbers(self, metrics: Mapping[str, float]) -> None:
        """Count steps in a row that break a rule of failurePolicy; end without saving when one has fired.

        What comes of it, a restart, a pause or the end of the job, is for the operator, which reads the counts too. Its call may be lost
        or come late, and until then nothing may make a checkpoint of these weights.
        """
        policy = self.applied.spec.failure_policy
        self.board.set(streaks=self._streaks.observe(metrics))
        trip = tripped(policy, self._streaks.counts, metrics)
        if trip is not None:
            self.stop(f"failurePolicy.{trip.rule} has fired: {trip.message}", StopKind.ROLLBACK)

    def ended_early(self) -> str:
        """Return how a run that was asked to end is reported: Stopped, or to be resumed Suspended or Interrupted."""
        kind = self.stops.kind
        if kind is StopKind.ROLLBACK:
            return "Interrupted"
        if kind is StopKind.FINISH or self.progress.step >= self.applied.spec.algorithm.steps:
            return "Stopped"
        return "Suspended" if kind is StopKind.SUSPEND else "Interrupted"

    def _finish(self, *, resumable: bool) -> None:
        if not resumable and self.parts.check is not None:
            self.parts.check.confirm()
        self.saving.finish(resumable=resumable)
