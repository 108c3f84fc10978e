"""The base of all programs. A program owns a loop; the runner starts the run, calls the loop, and ends the run.

The runner process never imports torch and never loads the model: it only has handles of worker groups, and metrics.
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

    Requests to stop and changes of the spec take effect when the loop calls `handle_requests`, which it does between steps and while it
    waits for members. No worker computes at these times, so the spec can be changed safely.
    """

    def __init__(self, run: Run, saving: Saving) -> None:
        """`run` is the run that the program trains in. `saving` stores the objects that the program registers in each checkpoint."""
        self.run, self.saving, self.report = run, saving, run.report
        self.applied, self.progress, self.stops, self.board = run.applied, run.progress, run.stops, run.board
        self._violations = ConsecutiveViolations(run.job.spec.failure_policy)

    @classmethod
    def groups(cls, spec: RLJobSpec) -> Mapping[str, Group]:
        """Return the worker groups that the program uses, by name. By default these are the groups of the built-in programs."""
        return groups_of(spec)

    @classmethod
    @abstractmethod
    def build(cls, run: Run) -> Self:
        """Create the program and its parts, and launch the worker groups that it uses."""

    @abstractmethod
    def start(self) -> None:
        """Wait for the groups, and resume from a checkpoint if one was asked for."""

    @abstractmethod
    def loop(self) -> None:
        """Run the steps until the last one. The exception Stopped ends the loop early."""

    # --- what a program may add ------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights and return the metrics `val/*`; empty for a program without validation."""
        return {}

    def apply(self, spec: RLJobSpec, before: RLJobSpec) -> None:  # noqa: B027 - a program may have nothing to change
        """Apply a changed spec to the parts of the program. Called inside `handle_requests`."""

    def finish(self, *, resumable: bool) -> None:
        """Save the result of the run. If `resumable`, the run will be resumed later, and only a checkpoint is written."""
        self.saving.finish(resumable=resumable)

    def status(self) -> Mapping[str, Any]:
        """Return the fields that the program adds to `/status`. May be called from any thread."""
        return {}

    def periodic_tasks(self) -> Sequence[Callable[[], None]]:
        """Return functions that are called once a second, on another thread than the loop."""
        return ()

    def close(self) -> None:  # noqa: B027 - a program may have nothing to stop
        """Stop background work."""

    # --- what the loop calls ---------------------------------------------------------------------------------------

    def handle_requests(self) -> None:
        """Raise Stopped if a stop was requested. Otherwise apply the newest spec that `PUT /control` accepted, if there is one."""
        self.stops.check()
        if not self.saving.loaded:
            return
        previous = self.applied.spec
        change = self.applied.take()
        if change is None:
            return
        self.apply(change.spec, previous)
        self.saving.checkpoints.adopt(change.spec)
        self.board.adopt(change.spec, change.generation)
        old, new = (spec.model_dump(mode="json", by_alias=True) for spec in (previous, change.spec))
        changed = ", ".join(path for path, _, _ in differences(old, new)) or "no change here"
        logger.info("generation %s of the job is applied: %s", change.generation, changed)

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Count consecutive steps that violate a rule of failurePolicy; when a rule fires, request an end without saving.

        The operator reads the same counts and decides whether the job is restarted, paused or ended. Its call may be lost or late. The run
        ends by itself because no checkpoint of the violating weights may be written before that call.
        """
        policy = self.applied.spec.failure_policy
        self.board.set(streaks=self._violations.observe(metrics))
        violation = fired_rule(policy, self._violations.counts, metrics)
        if violation is not None:
            self.stops.stop(f"failurePolicy.{violation.rule} has fired: {violation.message}", StopKind.ROLLBACK)
