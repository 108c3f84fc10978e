"""Decides when a checkpoint is due, writes checkpoints and the exported model, and repeats writes while the disk is full."""

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from rl_core.api.errors import ConfigError, InfrastructureError, StorageFull, WorkerLost
from rl_core.plan.failure_rules import fired_rule
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.checkpoints import Checkpoints, merge_errors
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.progress import RunProgress
from rl_core.runner.run import Run
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.stopping import StopController, StopKind
from rl_core.workers.group import WorkerGroup
from rl_core.workers.result import WorkerErrors

logger = logging.getLogger(__name__)
TIMED_SHARE = 0.02
"""Largest fraction of the run's time that checkpoints of checkpoint.everySeconds may take."""
ROOM_PAUSE = 5.0
"""Seconds between two attempts to write to a full storage."""
RESERVED = frozenset({"step", "version", "reward", "accuracy", "history", "mathematics", "changed", "model"})
"""Names in the runner's state that a program cannot register."""


class Due(Enum):
    """Which kind of checkpoint is due: LASTING or PASSING."""

    LASTING = "lasting"
    """By checkpoint.everySteps, by request, or after the last step; kept as checkpoint.keep says."""
    PASSING = "passing"
    """By checkpoint.everySeconds; the next checkpoint replaces it."""


class Stateful(Protocol):
    """An object whose state checkpoints store: the ledger of a text program, or any object of a user's program."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        ...


class Saving:
    """Saves and restores the run. Called by the loop only; not thread-safe."""

    def __init__(
        self,
        applied: AppliedSpec,
        progress: RunProgress,
        checkpoints: Checkpoints,
        *,
        board: StatusBoard,
        stops: StopController,
        output: Path,
        schedule: DeviceSchedule,
        groups: Sequence[WorkerGroup] = (),
        weights_digest: Callable[[], str] = lambda: "",
        resume: str = "none",
        first_epoch: int | None = None,
        room_pause: float = ROOM_PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Save the run by `checkpoints`; most arguments are parts of `Run`, see `of`.

        The worker groups `groups` write the shards of a checkpoint, and the first of them exports the model to `output`, inside
        `schedule.training()`. Empty means that the program's worker groups have no state to save. `weights_digest()` returns the digest of
        the manifest of the current weights. `resume` and `first_epoch` are those of `Checkpoints.find`. A write to a full disk is repeated
        after `room_pause` seconds.
        """
        self.checkpoints = checkpoints
        self.loaded = False
        """Whether the worker groups have their initial or restored state. The startup sets it; before that nothing may be saved."""
        self._applied, self._progress, self._groups, self._schedule = applied, progress, groups, schedule
        self._board, self._stops, self._output, self._digest = board, stops, output, weights_digest
        self._resume, self._first_epoch = resume, first_epoch
        self._room_pause, self._clock = room_pause, clock
        self._objects: dict[str, Stateful] = {}
        self._save_pending = False
        """Whether a checkpoint of everySteps was postponed because another one was being written."""
        self._began_at = self._tried_at = clock()
        """Clock, in seconds, at which the last save began and ended; at first, when the run began."""
        self._seconds = 0.0
        """Seconds from the begin of the last save to its publication."""

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        schedule: DeviceSchedule,
        groups: Sequence[WorkerGroup] = (),
        weights_digest: Callable[[], str] = lambda: "",
    ) -> "Saving":
        """Create the object for `run`; the other arguments are those of the constructor."""
        checkpoints = Checkpoints(run.job.spec, output=run.output, epoch=run.epoch, in_cluster=run.in_cluster)
        return cls(
            run.applied,
            run.progress,
            checkpoints,
            board=run.board,
            stops=run.stops,
            output=run.output,
            schedule=schedule,
            groups=groups,
            weights_digest=weights_digest,
            resume=run.resume,
            first_epoch=run.first_epoch,
        )

    # --- restoring ---------------------------------------------------------------------------------------------------

    def register(self, name: str, stateful: Stateful) -> None:
        """Store the state of `stateful` under `name` in each checkpoint, and load it on resume. Call it before `restore`.

        Raises ValueError for a name that is in use.
        """
        if name in RESERVED or name in self._objects:
            raise ValueError(f"name must be unused in the checkpoint, got {name!r}; choose another")
        self._objects[name] = stateful

    def restore(self) -> None:
        """Load the checkpoint to resume from, if there is one; otherwise move the history of an earlier run aside.

        The caller sets `loaded` to True when the worker groups are ready. Raises ConfigError if an invariant field has changed or the
        checkpoint lacks a registered name, DataError if its state or the history is damaged.
        """
        checkpoint = self.checkpoints.find(self._resume, first_epoch=self._first_epoch)
        if checkpoint is None:
            self.checkpoints.begin_afresh()
            return
        state = self.checkpoints.restore(checkpoint, self._load_shards)
        if absent := sorted(self._objects.keys() - state.keys()):
            raise ConfigError(
                f"a checkpoint must hold the state of {', '.join(absent)}, got none in {checkpoint.path}; it is of another program"
            )
        progress = self._progress
        progress.load_state_dict(state)
        for name, stateful in self._objects.items():
            stateful.load_state_dict(state[name])
        self._board.set(
            step=progress.step,
            policyVersion=progress.version,
            reward=progress.reward,
            checkpoint=self.checkpoints.describe(str(checkpoint.path)),
        )
        logger.info("resumed at step %s, version %s", progress.step, progress.version)

    def _load_shards(self, path: str) -> None:
        for loading in [group.load_checkpoint(path) for group in self._groups]:
            self._stops.wait(loading, self._applied.spec.runtime.deadlines.group_method)

    # --- saving ------------------------------------------------------------------------------------------------------

    def due(self) -> Due | None:
        """Return the kind of checkpoint to write after the step that has just finished, or None.

        Nothing is due in a run that is rolled back. While a checkpoint is being written in the background, only the last step of the run is
        due: waiting for the write would block the loop. A checkpoint of everySteps that is due meanwhile is postponed to the first step
        after the write has ended.
        """
        if self._stops.kind is StopKind.ROLLBACK:
            return None
        spec, step = self._applied.spec, self._progress.step
        interval = spec.checkpoint.every_steps
        if interval is not None and step % interval == 0:
            self._save_pending = True
        if step >= spec.algorithm.steps:
            return Due.LASTING
        if self.checkpoints.writing:
            return None
        if self.checkpoints.pop_request() or self._save_pending:
            self._save_pending = False
            return Due.LASTING
        if interval is None:
            return None
        return Due.PASSING if self._is_time(spec.checkpoint.every_seconds) else None

    def _is_time(self, seconds: float | None) -> bool:
        """Return whether a checkpoint by time is due.

        It is not if saving takes too long, or while steps violate a rule of failurePolicy.
        """
        if seconds is None or self._seconds > TIMED_SHARE * seconds or any(self._board.fact("streaks").values()):
            return False
        return self._clock() - self._tried_at >= seconds

    def save(self, due: Due = Due.LASTING, *, in_background: bool = False) -> None:
        """Publish a checkpoint of the last finished step, unless that step has one.

        Waits for the end of an earlier write first. `in_background` True only begins the write; `settle` reports its result. Raises
        InfrastructureError if the storage fails.
        """
        self.settle(wait=True)
        if self.checkpoints.last_step == self._progress.step:
            return
        self._began_at = self._clock()
        try:
            self._publish(passing=due is Due.PASSING, in_background=in_background)
        finally:
            self._note_end(self._clock())

    def _note_end(self, end: float) -> None:
        self._tried_at, self._seconds = end, end - self._began_at

    def settle(self, *, wait: bool = False) -> None:
        """Report the result of a checkpoint that was written in the background, success or failure, in `/status`.

        Returns at once if it is not finished; `wait` True waits for it. Raises WorkerLost; other failures of the storage are only reported.
        """
        try:
            path = self.checkpoints.settle(wait=wait)
            if path is not None:
                self._note_end(self.checkpoints.written_at)
                self._board.set(checkpoint=self.checkpoints.describe(path))
        except WorkerLost:
            raise
        except InfrastructureError as error:
            self._note_end(self.checkpoints.written_at)
            self._report_refusal(error, "training went on, and the next checkpoint is tried when it is due")

    def _publish(self, *, passing: bool, in_background: bool) -> None:
        progress = self._progress
        state = progress.state_dict() | {name: stateful.state_dict() for name, stateful in self._objects.items()}
        with self._board.during(Phase.CHECKPOINTING), self._schedule.training():
            path = self.checkpoints.save(
                progress.step,
                self._groups,
                state,
                version=progress.version,
                weights_digest=self._digest(),
                reward=progress.reward,
                passing=passing,
                num_violating_steps=max(self._board.fact("streaks").values(), default=0),
                in_background=in_background,
            )
        if path is not None:
            self._board.set(checkpoint=self.checkpoints.describe(path))

    def try_save(self, due: Due = Due.LASTING) -> None:
        """Save like `save`, but report and count a failure of the storage instead of raising it.

        Training then continues without this checkpoint.
        """
        is_last = self._progress.step >= self._applied.spec.algorithm.steps
        try:
            self.save(due, in_background=self._applied.spec.checkpoint.asynchronous and not is_last)
        except WorkerLost:
            raise
        except InfrastructureError as error:
            self._report_refusal(error, "training goes on from the weights in memory")

    def finish(self, *, resumable: bool) -> None:
        """Write a checkpoint of the last step, and export the model unless the run is `resumable`.

        A resumable run that is rolled back saves nothing; its checkpoints since the first violating step are set aside. At the final end,
        writes to a full disk are repeated for deadlines.degraded seconds.
        """
        self.settle(wait=True)
        if resumable:
            if self._stops.kind is StopKind.ROLLBACK:
                self._set_aside_violating_steps()
            else:
                self.save()
            return
        deadline = self._clock() + self._applied.spec.runtime.deadlines.degraded
        try:
            self.with_retries(self.save, deadline, what="the last checkpoint")
        finally:
            self.with_retries(self._export, deadline, what="the exported model")

    def _set_aside_violating_steps(self) -> None:
        """Set aside the checkpoints from the first violating step on, so that a resume starts before it."""
        violation = fired_rule(self._applied.spec.failure_policy, self._board.fact("streaks"))
        if violation is not None:
            path = self.checkpoints.set_aside_after(self._progress.step - violation.steps)
            self._board.set(checkpoint=self.checkpoints.describe(path))

    def _export(self) -> None:
        if not self._groups:
            return
        try:
            with self._schedule.training():
                self._stops.wait(self._groups[0].export_hf(str(self._output / "model")))
        except WorkerErrors as errors:
            raise merge_errors(errors) from errors

    def with_retries(
        self, write: Callable[[], None], until: float | None = None, *, what: str = "the ledger of trained groups"
    ) -> None:
        """Call `write`, which the run needs in order to continue or to end, and repeat it while the storage is full.

        `what` is written; `/status` shows that it waits for disk space.

        Gives up at clock time `until` (seconds; None means deadlines.degraded from now) or when a stop is requested, with a ConfigError: it
        is not an infrastructure failure, because a restart would train the same steps again and find the same full storage. A stop that
        keeps the run resumable raises StorageFull instead.
        """
        until = self._clock() + self._applied.spec.runtime.deadlines.degraded if until is None else until
        try:
            self._repeat(write, until, what)
        finally:
            self._board.wait_for_space(None)

    def _repeat(self, write: Callable[[], None], deadline: float, description: str) -> None:
        while True:
            try:
                write()
                return
            except StorageFull as error:
                remaining = deadline - self._clock()
                if self._stops.kind not in (None, StopKind.FINISH):
                    raise
                if self._stops.stop_requested or remaining <= 0:
                    saved = self.checkpoints.last_step
                    way_out = (
                        "begin the run again, which has no checkpoint"
                        if saved is None
                        else f"resume the run from step {saved}"
                    )
                    raise ConfigError(f"{error}; then {way_out}") from error
                self._board.wait_for_space(description)
                self._report_refusal(error, f"what was trained waits in memory for disk space, {remaining:.0f} s more")
            with self._board.during(Phase.CHECKPOINTING):
                self._stops.wait_for_stop_request(min(self._room_pause, remaining))
                self._stops.check()

    def _report_refusal(self, error: InfrastructureError, reaction: str) -> None:
        logger.error("%s; %s", error, reaction)
        self._board.count_failure("runner", "checkpoint")
        self._board.set(checkpoint={**self._board.fact("checkpoint"), "error": str(error)})
