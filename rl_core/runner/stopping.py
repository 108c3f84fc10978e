"""Ends a run early: which stop was requested, which failure came from outside the loop, and which waits of the loop they end.

Any thread may request a stop. The loop notices it in `wait`, `wait_done`, `check` and `leave_if_asked`. What happens depends on the phase:

    starting, generating, validating, degraded     the wait ends and the loop is left at once (`Stopped`)
    training                                       the actors leave the step before their next micro-batch
    syncing, checkpointing                         the work is finished first
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.runner.status import Phase
from rl_core.workers.group import WorkerGroupFuncResult

logger = logging.getLogger(__name__)
LEAVABLE = frozenset({Phase.GENERATING, Phase.VALIDATING, Phase.DEGRADED, Phase.STARTING})
"""Phases that the loop leaves at once."""


class Stopped(Exception):
    """A stop was requested; the loop leaves the step it is in."""


class StopKind(StrEnum):
    """Why a run ends before its last step. Of several requests the one that comes later in this list counts."""

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
    """Keeps the stop request and the failure from outside the loop, and ends the loop's waits for them."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        """`phase()` returns the present phase of the run."""
        self._phase = phase
        self._lock = threading.Lock()
        """Guards `_pending`, `_cancel` and `_asked`: a result is cancelled only while the loop waits for it, work only while it runs, and
        of two requests at the same time the stronger one is kept."""
        self._pending: WorkerGroupFuncResult | None = None
        self._cancel: Callable[[], object] | None = None
        self._failure: RLJobError | None = None
        self._asked: tuple[StopKind, str] | None = None
        self._event = threading.Event()

    # --- any thread ------------------------------------------------------------------------------------------------

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Request the end of the run. Do not call it from a signal handler: it takes locks that the interrupted loop may hold.

        A step that is being generated is left at once. A step that is being trained is left before its next micro-batch; its groups are
        not acknowledged, so a resumed run generates them again. A step whose training has ended is published first.
        """
        with self._lock:
            if self._asked is None or KINDS.index(kind) > KINDS.index(self._asked[0]):
                self._asked = (kind, reason)
            cancel = self._cancel
        self._event.set()
        if cancel is not None:
            cancel()
        elif self._phase() in LEAVABLE:
            self._end_wait()

    def fail(self, error: RLJobError) -> None:
        """End the run with `error`; the loop raises it from the wait it is in, or from the next one."""
        self._failure = self._failure or error
        self._end_wait()

    @property
    def asked(self) -> bool:
        """Whether a stop was requested."""
        return self._asked is not None

    @property
    def kind(self) -> StopKind | None:
        """Kind of the requested stop; None without a request."""
        return self._asked[0] if self._asked is not None else None

    @property
    def reason(self) -> str:
        """Reason of the requested stop; empty without a request."""
        return self._asked[1] if self._asked is not None else ""

    @property
    def failed(self) -> bool:
        """Whether something outside the loop ended the run."""
        return self._failure is not None

    def wait_asked(self, seconds: float) -> None:
        """Sleep until a stop is requested, at most `seconds`."""
        self._event.wait(seconds)

    def _end_wait(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._pending.cancel()

    # --- the loop --------------------------------------------------------------------------------------------------

    def wait(self, result: WorkerGroupFuncResult, timeout: float | None = None) -> list[Any]:
        """Return the results by rank. A failure from outside ends the wait, and so does a stop in a phase that can be left.

        Raises what a rank raised, DeadlineExceeded, Stopped, and the failure from outside.
        """
        with self._interruptible(result):
            return list(result.wait(timeout))

    def wait_done(self, result: WorkerGroupFuncResult, seconds: float) -> bool:
        """Wait at most `seconds`; return whether `result` has ended, by values or by an error that `wait` then raises.

        Raises Stopped and the failure from outside, as `wait`.
        """
        with self._interruptible(result):
            return result.wait_done(seconds)

    @contextmanager
    def _interruptible(self, result: WorkerGroupFuncResult) -> Iterator[None]:
        """Let a stop or a failure cancel `result` while the block waits for it."""
        with self._lock:
            self._pending = result
        try:
            self.check()  # a request made before `_pending` was set could not end the wait
            yield
        except RLJobError:
            self.check()  # a wait that was cancelled reports why, not that it was cancelled
            raise
        finally:
            with self._lock:
                self._pending = None

    @contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` when a stop is requested while the block runs. It must return at once.

        A stop that was requested before the block cannot cancel it: call `leave_if_asked` first inside the block.
        """
        with self._lock:
            self._cancel = cancel
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None

    def check(self) -> None:
        """Raise the failure from outside, or Stopped when a stop was requested in a phase that can be left."""
        if self._failure is not None:
            raise self._failure
        if self._phase() in LEAVABLE:
            self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Raise Stopped when a stop was requested."""
        if self.asked:
            raise Stopped(self.reason)
