"""Ends a run early: stores a requested stop or a failure of another thread, and ends the loop's waits for them.

Any thread may request a stop. The loop notices it in `wait`, `wait_done`, `check` and `raise_if_stop_requested`. What happens
depends on the phase:

    starting, generating, validating, degraded     the wait ends and the loop is left at once (`Stopped`)
    training                                       the actors leave the step before their next micro-batch
    syncing, checkpointing                         the work is finished first
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.runner.stall import Wait
from rl_core.runner.status import Phase
from rl_core.workers.group import WorkerGroupFuncResult

logger = logging.getLogger(__name__)
LEAVABLE = frozenset({Phase.GENERATING, Phase.VALIDATING, Phase.DEGRADED, Phase.STARTING})
"""Phases that the loop leaves at once when a stop is requested."""


class Stopped(Exception):
    """A stop was requested; the loop leaves the step it is in."""


class StopKind(StrEnum):
    """Why a run ends before its last step: FINISH, INTERRUPT, SUSPEND or ROLLBACK.

    The order is the priority: of several requests, the kind that is defined last here is kept.
    """

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
    """Stores the stop request and the failure reported by another thread, and cancels the loop's waits. Thread-safe."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        """`phase()` returns the current phase of the run."""
        self._phase = phase
        self._lock = threading.Lock()
        """Guards `_pending`, `_cancel` and `_request`: a result is cancelled only while the loop waits for it, work only while it runs, and
        of two requests at the same time the stronger one is kept."""
        self._pending: WorkerGroupFuncResult | None = None
        self._pending_since = 0.0
        self._cancel: Callable[[], object] | None = None
        self._failure: RLJobError | None = None
        self._request: tuple[StopKind, str] | None = None
        self._event = threading.Event()

    # --- any thread ------------------------------------------------------------------------------------------------

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Request the end of the run. Do not call it from a signal handler: it takes locks that the interrupted loop may hold.

        A step that is being generated is left at once. A step that is being trained is left before its next micro-batch; its groups are
        not acknowledged, so a resumed run generates them again. A step whose training has ended is published first.
        """
        with self._lock:
            if self._request is None or KINDS.index(kind) > KINDS.index(self._request[0]):
                self._request = (kind, reason)
            cancel = self._cancel
        self._event.set()
        if cancel is not None:
            cancel()
        elif self._phase() in LEAVABLE:
            self._end_wait()

    def fail(self, error: RLJobError) -> None:
        """Report a failure from any thread: the loop raises `error` from its current wait or the next one. The first failure is kept."""
        self._failure = self._failure or error
        self._end_wait()

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._request is not None

    @property
    def kind(self) -> StopKind | None:
        """Kind of the requested stop; None without a request."""
        return self._request[0] if self._request is not None else None

    @property
    def reason(self) -> str:
        """Reason of the requested stop; empty without a request."""
        return self._request[1] if self._request is not None else ""

    @property
    def failed(self) -> bool:
        """Whether a failure was reported by `fail`."""
        return self._failure is not None

    def pending_wait(self) -> Wait | None:
        """Return which call the loop waits for and the ranks that have not ended; None while it does not wait for one."""
        with self._lock:
            result, since = self._pending, self._pending_since
        if result is None:
            return None
        ranks = ", ".join(map(str, result.missing_ranks))
        return Wait(
            who="runner",
            on=result.group,
            what=f"{result.method} at rank {ranks}",
            since_seconds=time.monotonic() - since,
        )

    def wait_for_stop_request(self, seconds: float) -> None:
        """Sleep for `seconds`, or less if a stop is requested."""
        self._event.wait(seconds)

    def _end_wait(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._pending.cancel()

    # --- the loop --------------------------------------------------------------------------------------------------

    def wait(self, result: WorkerGroupFuncResult, timeout: float | None = None) -> list[Any]:
        """Wait for `result` and return its values by rank; `timeout` is in seconds, None means no limit.

        Raises what a rank raised, DeadlineExceeded after the timeout, Stopped if a stop is requested in a phase that can be left at once,
        and the error of `fail`.
        """
        with self._interruptible(result):
            return list(result.wait(timeout))

    def wait_done(self, result: WorkerGroupFuncResult, seconds: float) -> bool:
        """Wait at most `seconds`; return whether `result` has ended, with values or with an error that `wait` then raises.

        Raises Stopped and the error of `fail`, as `wait` does.
        """
        with self._interruptible(result):
            return result.wait_done(seconds)

    @contextmanager
    def _interruptible(self, result: WorkerGroupFuncResult) -> Iterator[None]:
        """Let a stop or a failure cancel `result` while the block waits for it."""
        with self._lock:
            self._pending, self._pending_since = result, time.monotonic()
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
        """Call `cancel` when a stop is requested while the block runs. `cancel` must not block.

        `cancel` is not called for a stop that was requested before the block: call `raise_if_stop_requested` first inside the block.
        """
        with self._lock:
            self._cancel = cancel
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None

    def check(self) -> None:
        """Raise the error of `fail`, or Stopped if a stop was requested and the current phase can be left at once."""
        if self._failure is not None:
            raise self._failure
        if self._phase() in LEAVABLE:
            self.raise_if_stop_requested()

    def raise_if_stop_requested(self) -> None:
        """Raise Stopped if a stop was requested, whatever the phase."""
        if self.stop_requested:
            raise Stopped(self.reason)
