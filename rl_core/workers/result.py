"""The result of one method call on several ranks: waits for all of them, raises failures early, names the ranks that are missing.

It depends on the `Call` protocol only; the group makes calls from RPC futures. Waits do not poll: a future that is set at the next change
wakes threads and coroutines alike.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal, Protocol

from rl_core.api.errors import DeadlineExceeded, RLJobError
from rl_core.messages.calls import MethodResult
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.workers.deadline_wait import DeadlineWait

SETTLE_SECONDS = 5.0
"""Seconds that the other ranks have to end after the first failure, before it is raised."""
Reduction = Literal["max", "min", "mean"]
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}


class CallCancelled(RLJobError, concurrent.futures.CancelledError):
    """The caller cancelled the call."""


class WorkerErrors(ExceptionGroup[Exception], RLJobError):
    """Several ranks failed; each error is as it would be alone."""


class Call(Protocol):
    """The call to one rank. Implemented over an RPC future by `cluster.PendingCall`, and by tests."""

    future: "concurrent.futures.Future[MethodResult]"

    def describe(self) -> str:
        """Return the member and what it last reported, for an error that lists it as missing."""

    def cancel(self) -> None:
        """Give up; the handler is cancelled where it can be."""


class WorkerGroupFuncResult:
    """A running group call; `wait` and `async_wait` give the values in rank order and may be called again."""

    def __init__(
        self,
        group: str,
        method: str,
        calls: Mapping[int, Call],
        *,
        default_timeout: float = 3600.0,
        settle: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group = group
        self.method = method
        self._calls = dict(sorted(calls.items()))
        self._default_timeout = default_timeout
        self._settle = settle
        self._clock = clock
        self._began = clock()
        self._cancelled = False
        self._failed_at: float | None = None
        self._consumed = False
        self._lock = threading.Lock()
        """Guards `_next_change`: ranks end on several threads."""
        self._next_change: concurrent.futures.Future[None] = concurrent.futures.Future()
        for call in self._calls.values():
            call.future.add_done_callback(self._on_done)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.async_wait().__await__()

    @property
    def ranks(self) -> list[int]:
        """Return the ranks called."""
        return list(self._calls)

    def done(self) -> bool:
        """Return whether every rank has ended or the call was cancelled."""
        return self._cancelled or not self._missing()

    def cancel(self) -> None:
        """Give up on all ranks that have not ended; waiters get CallCancelled."""
        if self.done():
            return
        self._cancelled = True
        for call in self._calls.values():
            call.cancel()
        self._announce_change()

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order. `timeout` None = until `deadlines.groupMethod` after the call began.

        Raises the failure of a rank (several: an ExceptionGroup) once all ranks ended or 5 s after the first one failed,
        DeadlineExceeded naming the missing ranks, CallCancelled; RuntimeError on an event-loop thread.
        """
        refuse_on_event_loop(f"wait() of {self.group}.{self.method}")
        wait = self._deadline_wait(timeout)
        for change, pause in self._changes(wait):
            concurrent.futures.wait([change], pause)
        return self._outcome(wait)

    def wait_done(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the call is over, so that `wait` returns or raises at once.

        It is over when every rank has ended, when it was cancelled, and some seconds after a rank has failed.
        """
        refuse_on_event_loop(f"wait_done() of {self.group}.{self.method}")
        for change, pause in self._changes(self._deadline_wait(seconds)):
            concurrent.futures.wait([change], pause)
        return self.done() or (self._failed_at is not None and self._clock() >= self._failed_at + self._settle)

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order, as `wait`; cancelling the task leaves the call running."""
        wait = self._deadline_wait(timeout)
        for change, pause in self._changes(wait):
            await asyncio.wait([asyncio.wrap_future(change)], timeout=pause)
        return self._outcome(wait)

    def consume_duration(self, reduction: Reduction = "max") -> float:
        """Return the seconds the method took, reduced over ranks; 0.0 when they were consumed before. Waits for the end."""
        durations: dict[str, float] = self.consume_durations(reduction=reduction)
        return durations.get(self.method, 0.0)

    def consume_durations(self, return_per_rank: bool = False, *, reduction: Reduction = "max") -> Any:
        """Return seconds by timer tag, the method's own under its name, reduced over ranks; with `return_per_rank` also [rank] of maps.

        Consumed once, then 0.0. Waits for the end.
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
        what = f"{self.group}.{self.method}"
        if timeout is None:
            return DeadlineWait(what, self._default_timeout, began=self._began, clock=self._clock)
        return DeadlineWait(what, timeout, clock=self._clock)

    def _changes(self, wait: DeadlineWait) -> Iterator[tuple["concurrent.futures.Future[None]", float]]:
        """Yield what to wait for next and how long, until the wait is over."""
        while True:
            change = (
                self._next_change
            )  # taken before the state is read, else a change between the two would wake nobody
            if self.done():
                return
            end = None if self._failed_at is None else self._failed_at + self._settle
            pause = wait.pause(self._names, end=end)
            if pause is None:
                return
            yield change, pause

    def _on_done(self, future: "concurrent.futures.Future[MethodResult]") -> None:
        if _error_of(future) is not None and self._failed_at is None:
            self._failed_at = self._clock()
        self._announce_change()

    def _announce_change(self) -> None:
        with self._lock:
            change, self._next_change = self._next_change, concurrent.futures.Future()
        change.set_result(None)

    def _missing(self) -> list[Call]:
        return [call for call in self._calls.values() if not call.future.done()]

    def _names(self) -> str:
        return "; ".join(call.describe() for call in self._missing())

    def _outcome(self, wait: DeadlineWait) -> list[Any]:
        if self._cancelled:
            raise CallCancelled(f"{self.group}.{self.method} was cancelled after {self._clock() - self._began:.1f} s")
        ended = [call.future for call in self._calls.values() if call.future.done()]
        errors = [error for future in ended if (error := _error_of(future)) is not None]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            first = f"{type(errors[0]).__name__}: {errors[0]}".partition("\n")[0]
            failed = f"{len(errors)} of {len(self._calls)} ranks"
            raise WorkerErrors(f"{self.group}.{self.method} failed on {failed}, the first: {first}", errors)
        if len(ended) < len(self._calls):
            raise DeadlineExceeded(
                f"{self.group}.{self.method} must end on {len(self._calls)} ranks within {wait.seconds:.1f} s, "
                f"missing after {self._clock() - self._began:.1f} s: {self._names()}"
            )
        return [future.result().value for future in ended]


def _error_of(future: "concurrent.futures.Future[MethodResult]") -> Exception | None:
    """Return what an ended rank raised; None for a value and for a rank that was cancelled."""
    error = None if future.cancelled() else future.exception()
    return error if isinstance(error, Exception) else None
