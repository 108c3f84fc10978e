"""The base of all programs. A program owns a loop; the runner starts the run, calls the loop, and ends the run.

The runner process never imports torch or the model: it holds handles of groups of workers, and numbers.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rl_core.api.job import RLJobSpec
from rl_core.plan.failure_rules import fired_rule
from rl_core.plan.groups import Group, groups_of
from rl_core.runner.changes import differences
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.stopping import StopKind
from rl_core.runner.violations import ConsecutiveViolations

logger = logging.getLogger(__name__)


class Program(ABC):
    """Owns a loop over groups of workers.

    Stops and changes of the spec reach the loop where it calls `handle_requests`: between steps, and while it waits for members. Workers
    compute nothing at either place, so a spec may change there.
    """

    def __init__(self, run: Run, saving: Saving) -> None:
        """Take part in `run`; `saving` writes the checkpoints of the objects that the program registers with it."""
        self.run, self.saving, self.report = run, saving, run.report
        self.applied, self.progress, self.stops, self.board = run.applied, run.progress, run.stops, run.board
        self._violations = ConsecutiveViolations(run.job.spec.failure_policy)

    @classmethod
    def groups(cls, spec: RLJobSpec) -> Mapping[str, Group]:
        """Return the groups that the program drives, by name; those of the built-in programs unless a program says otherwise."""
        return groups_of(spec)

    @classmethod
    @abstractmethod
    def build(cls, run: Run) -> Self:
        """Return the program with its parts; launch the groups that it drives."""

    @abstractmethod
    def start(self) -> None:
        """Wait for the groups, and resume from a checkpoint if one was asked for."""

    @abstractmethod
    def loop(self) -> None:
        """Run step after step until the last one. Stopped leaves it."""

    # --- what a program may add ------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Measure the present weights; return `val/*`, empty for a program without validation."""
        return {}

    def apply(self, spec: RLJobSpec, before: RLJobSpec) -> None:  # noqa: B027 - a program may have nothing to change
        """Apply a changed spec to the parts of the program. Called inside `handle_requests`."""

    def finish(self, *, resumable: bool) -> None:
        """Save what the run came to. `resumable`: the run will be resumed, so only a checkpoint is written."""
        self.saving.finish(resumable=resumable)

    def status(self) -> Mapping[str, Any]:
        """Return what the program adds to `/status`. Any thread."""
        return {}

    def periodic_tasks(self) -> Sequence[Callable[[], None]]:
        """Return functions to call once a second beside the loop, on a thread of their own."""
        return ()

    def close(self) -> None:  # noqa: B027 - a program may have nothing to stop
        """Stop background work."""

    # --- what the loop calls ---------------------------------------------------------------------------------------

    def handle_requests(self) -> None:
        """Raise Stopped if a stop was requested; apply the spec that `PUT /control` brought."""
        self.stops.check()
        if not self.saving.loaded:
            return
        before = self.applied.spec
        change = self.applied.take()
        if change is None:
            return
        self.apply(change.spec, before)
        self.saving.checkpoints.adopt(change.spec)
        self.board.adopt(change.spec, change.generation)
        old, new = (spec.model_dump(mode="json", by_alias=True) for spec in (before, change.spec))
        changed = ", ".join(path for path, _, _ in differences(old, new)) or "no change here"
        logger.info("generation %s of the job is applied: %s", change.generation, changed)

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Count consecutive steps that violate a rule of failurePolicy; when a rule fires, request an end without saving.

        What follows, a restart, a pause or the end of the job, is decided by the operator, which reads the counts too. Its call may be
        lost or late, and until it comes no checkpoint of these weights may be made.
        """
        policy = self.applied.spec.failure_policy
        self.board.set(streaks=self._violations.observe(metrics))
        trip = fired_rule(policy, self._violations.counts, metrics)
        if trip is not None:
            self.stops.stop(f"failurePolicy.{trip.rule} has fired: {trip.message}", StopKind.ROLLBACK)
