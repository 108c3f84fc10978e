"""The result of one method call on several ranks. It waits for all of them, raises failures early, and names the ranks that are missing.

It depends only on the `RankCall` protocol; the group creates such calls from RPC futures. Waits do not poll: the first failure and the end
of the last rank wake threads and coroutines alike.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal, Protocol

from rl_core.api.errors import DeadlineExceeded, RLJobError, WorkerLost
from rl_core.messages.calls import MethodResult
from rl_core.transports.rpc_call import CallFuture, ClientClosed
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.workers.deadline_wait import DeadlineWait

logger = logging.getLogger(__name__)
SETTLE_SECONDS = 5.0
"""Seconds that the other ranks have to end after the first failure, before it is raised."""
_failures: "weakref.WeakSet[WorkerGroupFuncResult]" = weakref.WeakSet()
"""Calls of this process of which a rank failed. Waits for other calls name those whose error nobody has received."""
_failures_lock = threading.Lock()
Reduction = Literal["max", "min", "mean"]
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}


class CallCancelled(RLJobError, concurrent.futures.CancelledError):
    """Raised to waiters when the caller has cancelled the group call."""


class WorkerErrors(ExceptionGroup[Exception], RLJobError):
    """Several ranks failed. Its exceptions are the errors of the single ranks."""


class RankCall(Protocol):
    """The call to one rank. Implemented by `cluster.PendingCall` and by tests."""

    future: "concurrent.futures.Future[MethodResult]"

    def describe(self) -> str:
        """Return one line about the member and its last report, for errors that list it as missing."""

    def cancel(self) -> None:
        """Cancel the call, and its handler if the handler can be cancelled."""


class WorkerGroupFuncResult:
    """A group call in progress, with one result per rank.

    `wait` and `async_wait` return the values in the order of ranks and may be called several times. Awaiting the object is the same as
    `async_wait()`.
    """

    def __init__(
        self,
        group: str,
        method: str,
        calls: Mapping[int, RankCall],
        *,
        default_timeout: float = 3600.0,
        settle: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for `calls`, which have been started, by rank.

        - `group`, `method`: names for messages.
        - `default_timeout`: seconds from now after which `wait()` without a timeout fails.
        - `settle`: seconds that the other ranks have to end after the first failure.
        - `clock`: returns seconds.
        """
        self.group = group
        self.method = method
        self._calls = dict(sorted(calls.items()))
        self._default_timeout = default_timeout
        self._settle = settle
        self._clock = clock
        self._start = clock()
        self._cancelled = False
        self._failed_at: float | None = None
        self._consumed = False
        self._received = False
        """Whether a caller has received the result or an error. If not, a failure is logged when the object is deleted."""
        self._lock = threading.Lock()
        """Guards the three fields below, because calls to ranks end on several threads."""
        self._wakes: list[Callable[[], object]] = []
        """Functions that wake the waiting threads and coroutines."""
        self._version = 0
        """Rises with each change that ends a wait or makes it shorter."""
        self._running = len(self._calls)
        """Ranks that have not ended."""
        # A weak reference avoids a cycle, so that calls that have ended are freed without the garbage collector.
        on_done = functools.partial(_rank_ended, weakref.ref(self), f"{group}.{method}")
        for call in self._calls.values():
            call.future.add_done_callback(on_done)

    def __del__(self) -> None:
        if getattr(self, "_received", True) or self._cancelled:
            return
        for call in self._calls.values():
            if call.future.done():
                _log_forgotten(f"{self.group}.{self.method}", call.future)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.async_wait().__await__()

    @property
    def ranks(self) -> list[int]:
        """The ranks that were called, in order."""
        return list(self._calls)

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that have not ended, in order."""
        return [rank for rank, call in self._calls.items() if not call.future.done()]

    def done(self) -> bool:
        """Return whether every rank has ended or the call was cancelled."""
        return self._cancelled or not self._running

    def cancel(self) -> None:
        """Cancel the call on all ranks that have not ended. Waiters get CallCancelled."""
        if self.done():
            return
        self._cancelled = True
        for call in self._calls.values():
            call.cancel()
        self._announce_change()

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks and return their values in the order of ranks.

        `timeout` is in seconds from now; None waits until `default_timeout` seconds after the call began.

        When a rank fails, its error is raised as soon as all ranks have ended, but at most `settle` seconds (5) after the failure; several
        errors are raised as one WorkerErrors. Raises DeadlineExceeded naming the missing ranks, CallCancelled, and RuntimeError on the
        thread of an event loop.
        """
        refuse_on_event_loop(f"wait() of {self.group}.{self.method}")
        wait = self._deadline_wait(timeout)
        self._wait(wait)
        return self._outcome(wait)

    def wait_done(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether `wait` would now return or raise at once.

        That is the case when every rank has ended, when the call was cancelled, or when a rank failed at least `settle` seconds ago. Raises
        RuntimeError on the thread of an event loop.
        """
        refuse_on_event_loop(f"wait_done() of {self.group}.{self.method}")
        self._wait(self._deadline_wait(seconds))
        return self.done() or (self._failed_at is not None and self._clock() >= self._failed_at + self._settle)

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values as `wait` does. Cancelling the waiting task does not cancel the call."""
        wait = self._deadline_wait(timeout)
        loop = asyncio.get_running_loop()
        for version, pause in self._changes(wait):
            changed = asyncio.Event()
            with self._woken(version, functools.partial(loop.call_soon_threadsafe, changed.set)) as unchanged:
                if unchanged:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), pause)
        return self._outcome(wait)

    def consume_duration(self, reduction: Reduction = "max") -> float:
        """Wait for the end and return the seconds that the method took, reduced over ranks.

        Durations can be read once; afterwards `consume_duration` and `consume_durations` give 0.0, so that no time is counted twice.
        """
        durations: dict[str, float] = self.consume_durations(reduction=reduction)
        return durations.get(self.method, 0.0)

    def consume_durations(self, return_per_rank: bool = False, *, reduction: Reduction = "max") -> Any:
        """Wait for the end and return the seconds by timer tag, reduced over ranks. The method's own time has its name as tag.

        With `return_per_rank` the result is a pair: this dictionary, and a list with the dictionary of each rank. Durations can be read
        once; afterwards all are 0.0. Raises ValueError for an unknown `reduction`.
        """
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {sorted(_REDUCTIONS)}, got {reduction!r}")
        self.wait()
        per_rank = [dict(call.future.result().durations) for call in self._calls.values()]
        if self._consumed:
            per_rank = [dict.fromkeys(durations, 0.0) for durations in per_rank]
        self._consumed = True
        tags = sorted({tag for durations in per_rank for tag in durations})
        reduce = _REDUCTIONS[reduction]
        reduced = {tag: reduce([durations.get(tag, 0.0) for durations in per_rank]) for tag in tags}
        return (reduced, per_rank) if return_per_rank else reduced

    # --- inside ----------------------------------------------------------------------------------------------------

    def _deadline_wait(self, timeout: float | None) -> DeadlineWait:
        description = f"{self.group}.{self.method}"
        if timeout is None:
            return DeadlineWait(description, self._default_timeout, began=self._start, clock=self._clock)
        return DeadlineWait(description, timeout, clock=self._clock)

    def _wait(self, wait: DeadlineWait) -> None:
        single = next(iter(self._calls.values())).future if len(self._calls) == 1 else None
        for version, pause in self._changes(wait):
            if isinstance(single, CallFuture) and single.read_until_done(pause) and (self.done() or not single.done()):
                continue
            changed = threading.Event()
            with self._woken(version, changed.set) as unchanged:
                if unchanged:
                    changed.wait(pause)

    @contextlib.contextmanager
    def _woken(self, version: int, wake: Callable[[], object]) -> Iterator[bool]:
        """Call `wake()` at the next change after `version`, while the block runs. The value is false if there was a change already."""
        with self._lock:
            unchanged = self._version == version
            if unchanged:
                self._wakes.append(wake)
        try:
            yield unchanged
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._wakes.remove(wake)

    def _changes(self, wait: DeadlineWait) -> Iterator[tuple[int, float]]:
        """Yield (version after which to wait for a change, seconds to wait) until the wait is over."""
        while True:
            version = self._version  # Read before the state; otherwise a change between the two would wake nobody.
            if self.done():
                return
            end = None if self._failed_at is None else self._failed_at + self._settle
            pause = wait.pause(self._names, end=end)
            if pause is None:
                return
            yield version, pause

    def _on_done(self, future: "concurrent.futures.Future[MethodResult]") -> None:
        failed = _error_of(future) is not None
        with self._lock:
            self._running -= 1
            first_failure = failed and self._failed_at is None
            if first_failure:
                self._failed_at = self._clock()
            all_done = not self._running
        if first_failure:
            with _failures_lock:
                _failures.add(self)
        if all_done or first_failure:
            self._announce_change()

    def _announce_change(self) -> None:
        with self._lock:
            self._version += 1
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            with contextlib.suppress(RuntimeError):  # The event loop of the waiting coroutine was closed.
                wake()

    def _missing(self) -> list[RankCall]:
        return [call for call in self._calls.values() if not call.future.done()]

    def _names(self) -> str:
        """Describe the ranks that have not ended, and the failures of other calls, which may be the reason."""
        with _failures_lock:
            failed_calls = [
                call for call in _failures if call is not self and not call._received and not call._cancelled
            ]
        failures = [f"{call.group}.{call.method} failed: {_summary(call._errors()[0])}" for call in failed_calls]
        return "; ".join([*(call.describe() for call in self._missing()), *failures])

    def _errors(self) -> list[Exception]:
        done = [call.future for call in self._calls.values() if call.future.done()]
        return [error for future in done if (error := _error_of(future)) is not None]

    def _outcome(self, wait: DeadlineWait) -> list[Any]:
        self._received = self._received or self.done() or self._failed_at is not None
        if self._cancelled:
            raise CallCancelled(f"{self.group}.{self.method} was cancelled after {self._clock() - self._start:.1f} s")
        if not self._running and self._failed_at is None:
            return [call.future.result().value for call in self._calls.values()]
        # The frames that read an answer explain nothing, and each error would be printed with them.
        errors = [error.with_traceback(None) for error in self._errors()]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            failed = f"{len(errors)} of {len(self._calls)} ranks"
            raise WorkerErrors(
                f"{self.group}.{self.method} failed on {failed}, the first: {_summary(errors[0])}", errors
            )
        if self._missing():
            raise DeadlineExceeded(
                f"{self.group}.{self.method} must end on {len(self._calls)} ranks within {wait.seconds:g} s, "
                f"missing after {self._clock() - self._start:.1f} s: {self._names()}"
            )
        return [call.future.result().value for call in self._calls.values()]


def _rank_ended(
    result: "weakref.ref[WorkerGroupFuncResult]", name: str, future: "concurrent.futures.Future[MethodResult]"
) -> None:
    """Handle the end of the call to one rank of the group call `name`.

    It notifies the result object of the group call. If this object was deleted, nobody can receive an error of the rank, which is logged.
    """
    if (follower := result()) is not None:
        follower._on_done(future)
    else:
        _log_forgotten(name, future)


def _log_forgotten(name: str, future: "concurrent.futures.Future[MethodResult]") -> None:
    """Log the error of a rank in the group call `name`, whose result object was deleted.

    WorkerLost is not logged, because the hub reports losses, and ClientClosed because the caller itself ended the call.
    """
    error = _error_of(future)
    if error is not None and not isinstance(error, WorkerLost | ClientClosed):
        logger.warning("%s failed and nobody waited for its result: %s: %s", name, type(error).__name__, error)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _error_of(future: "concurrent.futures.Future[MethodResult]") -> Exception | None:
    """Return the error of a call that has ended; None if it returned a value or was cancelled."""
    try:
        error = future.exception()
    except concurrent.futures.CancelledError:
        return None
    return error if isinstance(error, Exception) else None
