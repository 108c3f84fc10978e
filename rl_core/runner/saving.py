"""Saves what the run came to: checkpoints when they are due, the last one and the model at the end, and patience with a full storage."""

import logging
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from rl_core.api.errors import ConfigError, InfrastructureError, StorageFull, WorkerLost
from rl_core.plan.failure_rules import tripped
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.checkpoints import Checkpoints, as_one
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.progress import Progress
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.stopping import StopController, StopKind
from rl_core.runner.sync import WeightSync
from rl_core.workers.group import WorkerGroup
from rl_core.workers.result import WorkerErrors

logger = logging.getLogger(__name__)
TIMED_SHARE = 0.02
"""Largest share of the run's time that checkpoints between those of everySteps may take."""
ROOM_PAUSE = 5.0
"""Seconds between two attempts to write to a full storage."""


class Due(Enum):
    """Why a step is to be saved."""

    LASTING = "lasting"
    PASSING = "passing"
    """By time; the next checkpoint replaces it."""


class Saving:
    """What is written, when, and what a refusal means. Called by the loop."""

    def __init__(
        self,
        applied: AppliedSpec,
        progress: Progress,
        checkpoints: Checkpoints,
        *,
        actor: WorkerGroup,
        schedule: DeviceSchedule,
        dispatcher: Dispatcher,
        sync: WeightSync,
        board: StatusBoard,
        stops: StopController,
        output: Path,
        room_pause: float = ROOM_PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`output` gets the exported model."""
        self.checkpoints = checkpoints
        self._applied, self._progress = applied, progress
        self._actor, self._schedule, self._dispatcher, self._sync = actor, schedule, dispatcher, sync
        self._board, self._stops, self._output = board, stops, output
        self._room_pause, self._clock = room_pause, clock
        self._tried_at = clock()
        """When the last save ended, or this run began."""
        self._seconds = 0.0
        """How long the last save took; the first one of a run tells it."""

    def due(self) -> Due | None:
        """Return why the step just finished is to be saved, None when it is not; never when it is rolled back."""
        if self._stops.kind is StopKind.ROLLBACK:
            return None
        spec, step = self._applied.spec, self._progress.step
        every = spec.checkpoint.every_steps
        if self.checkpoints.take_ask() or step >= spec.algorithm.steps:
            return Due.LASTING
        if every is None:
            return None
        if step % every == 0:
            return Due.LASTING
        return Due.PASSING if self._time_has_come(spec.checkpoint.every_seconds) else None

    def _time_has_come(self, seconds: float | None) -> bool:
        """Return whether a checkpoint by time may be made: cheap ones only, and none of weights that a rule may roll back."""
        if seconds is None or self._seconds > TIMED_SHARE * seconds or any(self._board.fact("streaks").values()):
            return False
        return self._clock() - self._tried_at >= seconds

    def save(self, due: Due = Due.LASTING, *, in_background: bool = False) -> None:
        """Publish a checkpoint of the last finished step, unless it exists; `in_background`: begin to, and let `settle` publish it.

        Raises InfrastructureError when the storage refuses. One checkpoint is written at a time.
        """
        self.settle(wait=True)
        if self.checkpoints.last_step == self._progress.step:
            return
        began = self._clock()
        try:
            self._publish(passing=due is Due.PASSING, in_background=in_background)
        finally:
            self._tried_at = self._clock()
            self._seconds = self._tried_at - began

    def settle(self, *, wait: bool = False) -> None:
        """Publish the checkpoint that the ranks wrote in the background, if they are done or after a `wait`; report one that failed."""
        try:
            if (path := self.checkpoints.settle(wait=wait)) is not None:
                self._board.set(checkpoint=self.checkpoints.describe(path))
        except WorkerLost:
            raise
        except InfrastructureError as error:
            self._report_refusal(error, "training went on, and the next checkpoint is tried when it is due")

    def _publish(self, *, passing: bool, in_background: bool) -> None:
        progress = self._progress
        state = progress.state_dict() | {"ledger": self._dispatcher.state_dict()}
        with self._board.during(Phase.CHECKPOINTING), self._schedule.training():
            path = self.checkpoints.save(
                progress.step,
                self._actor,
                state,
                version=progress.version,
                weights_digest=self._sync.digest,
                reward=progress.reward,
                passing=passing,
                wrong_steps=max(self._board.fact("streaks").values(), default=0),
                in_background=in_background,
            )
        if path is not None:
            self._board.set(checkpoint=self.checkpoints.describe(path))

    def try_save(self, due: Due = Due.LASTING) -> None:
        """Publish a checkpoint, or report and count that the storage refused: the next one may succeed, and training loses nothing."""
        last = self._progress.step >= self._applied.spec.algorithm.steps
        try:
            self.save(due, in_background=self._applied.spec.checkpoint.asynchronous and not last)
        except WorkerLost:
            raise
        except InfrastructureError as error:
            self._report_refusal(error, "training goes on from the weights in memory")

    def finish(self, *, resumable: bool) -> None:
        """Save what the run came to: a checkpoint of the last step, and the model unless the run is to be resumed."""
        self.settle(wait=True)
        if resumable:
            if self._stops.kind is StopKind.ROLLBACK:
                self._leave_wrong_steps()
            else:
                self.save()
            return
        until = self._clock() + self._applied.spec.runtime.deadlines.degraded
        try:
            self.with_patience(self.save, until)
        finally:
            self.with_patience(self._export, until)

    def _leave_wrong_steps(self) -> None:
        """Make the checkpoint before the numbers went wrong the newest: those since then are set aside."""
        trip = tripped(self._applied.spec.failure_policy, self._board.fact("streaks"))
        if trip is not None:
            path = self.checkpoints.leave_after(self._progress.step - trip.steps)
            self._board.set(checkpoint=self.checkpoints.describe(path))

    def _export(self) -> None:
        try:
            with self._schedule.training():
                self._stops.wait(self._actor.export_hf(str(self._output / "model")))
        except WorkerErrors as errors:
            raise as_one(errors) from errors

    def with_patience(self, write: Callable[[], None], until: float | None = None) -> None:
        """Do a write that the run cannot go on or end without; while the storage is full try again, unless the run is asked to end.

        `until`: clock at which to give up, None = deadlines.degraded from now.
        Raises ConfigError when no room was made: a restart would only train the same steps again and meet the same storage.
        """
        until = self._clock() + self._applied.spec.runtime.deadlines.degraded if until is None else until
        while True:
            try:
                write()
                return
            except StorageFull as error:
                left = until - self._clock()
                if self._stops.kind not in (None, StopKind.FINISH):
                    raise
                if self._stops.asked or left <= 0:
                    raise ConfigError(f"{error}; then resume the run from its last checkpoint") from error
                self._report_refusal(error, f"what was trained waits in memory for room, {left:.0f} s more")
            with self._board.during(Phase.CHECKPOINTING):
                self._stops.wait_asked(min(self._room_pause, left))
                self._stops.check()

    def _report_refusal(self, error: InfrastructureError, reaction: str) -> None:
        logger.error("%s; %s", error, reaction)
        self._board.count_failure("runner", "checkpoint")
        self._board.set(checkpoint={**self._board.fact("checkpoint"), "error": str(error)})
