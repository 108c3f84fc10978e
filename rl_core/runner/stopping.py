"""Ends the run early: who asked for it and how, what failed, and the waits of the loop that hear of it.

Any thread asks; the loop hears of it where it says so: in `wait`, in `check` and in `leave_if_asked`. What happens next depends on the
phase the run is in:

    starting, generating, validating, degraded     the wait ends and the loop is left at once (`Stopped`)
    training                                       the actors leave the step before their next micro-batch
    syncing, checkpointing                         finished first
"""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.runner.status import Phase
from rl_core.workers.group import WorkerGroupFuncResult

logger = logging.getLogger(__name__)
LEAVABLE = frozenset({Phase.GENERATING, Phase.VALIDATING, Phase.DEGRADED, Phase.STARTING})
"""Phases that the loop leaves at once."""


class Stopped(Exception):
    """The run was asked to end; the loop leaves the step it is in."""


class StopKind(StrEnum):
    """Why a run ends before its last step; of several requests the later of this list counts."""

    FINISH = "finish"
    """For good: checkpoint and model are saved, exit code 0."""
    INTERRUPT = "interrupt"
    """The pod must go (SIGTERM), or the job failed by a rule or a deadline: a checkpoint is saved within the grace, exit code 3."""
    SUSPEND = "suspend"
    """To be resumed: a checkpoint is saved, exit code 0, phase Suspended."""
    ROLLBACK = "rollback"
    """To be resumed from an older checkpoint: nothing is saved, exit code 3."""


KINDS = tuple(StopKind)


class StopController:
    """The one place where a stop or a failure from outside the loop is kept."""

    def __init__(self, phase: Callable[[], Phase], *, cancel_training: Callable[[], object]) -> None:
        """`phase()` is the present phase; `cancel_training` tells the actors to leave their step and returns at once."""
        self._phase, self._cancel_training = phase, cancel_training
        self._lock = threading.Lock()
        """Guards `_pending`: a result is cancelled only while the loop waits for it."""
        self._pending: WorkerGroupFuncResult | None = None
        self._failure: RLJobError | None = None
        self._asked: tuple[StopKind, str] | None = None
        self._event = threading.Event()

    # --- any thread ------------------------------------------------------------------------------------------------

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Ask the run to end. Not from a signal's handler: it takes locks that the loop may hold.

        The step being generated is left at once, the one being trained before its next micro-batch (`Actor.cancel_training` says when
        not): its groups are not acknowledged, so a resume gives them out again. A step that is trained is published first.
        """
        if self._asked is None or KINDS.index(kind) > KINDS.index(self._asked[0]):
            self._asked = (kind, reason)
        self._event.set()
        phase = self._phase()
        if phase in (Phase.GENERATING, Phase.VALIDATING):
            self._end_wait()
        elif phase is Phase.TRAINING:
            self._cancel_training()

    def fail(self, error: RLJobError) -> None:
        """End the run with `error`; the loop raises it from the wait it is in, or from the next one."""
        self._failure = self._failure or error
        self._end_wait()

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end."""
        return self._asked is not None

    @property
    def kind(self) -> StopKind | None:
        """How it was asked to end; None when it was not."""
        return self._asked[0] if self._asked is not None else None

    @property
    def reason(self) -> str:
        """Why it was asked to end; empty when it was not."""
        return self._asked[1] if self._asked is not None else ""

    @property
    def failed(self) -> bool:
        """Whether something outside the loop ended the run."""
        return self._failure is not None

    def wait_asked(self, seconds: float) -> None:
        """Rest until the run is asked to end, at most `seconds`."""
        self._event.wait(seconds)

    def _end_wait(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._pending.cancel()

    # --- the loop --------------------------------------------------------------------------------------------------

    def wait(self, result: WorkerGroupFuncResult, timeout: float | None = None) -> list[Any]:
        """Return the results by rank. A failure from outside ends the wait, and so does a stop in a phase that can be left."""
        with self._lock:
            self._pending = result
        try:
            self.check()  # what was asked before `_pending` was set could not end the wait
            return list(result.wait(timeout))
        except RLJobError:
            self.check()  # a cancelled wait is the reason's fault, not the result's
            raise
        finally:
            with self._lock:
                self._pending = None

    def check(self) -> None:
        """Raise what ended the run from outside the loop: a failure, or Stopped in a phase that can be left."""
        if self._failure is not None:
            raise self._failure
        if self._phase() in LEAVABLE:
            self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Raise Stopped when the run was asked to end."""
        if self.asked:
            raise Stopped(self.reason)
