"""The result of one method call on several ranks: wait for all, hear of failures soon, name who is missing (runtime.md 3.2).

Pure over `Call`s; the group makes those from RPC futures. Nothing polls: futures wake the waiter.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rl_core.api.errors import DeadlineExceeded, RLJobError
from rl_core.messages.calls import MethodResult
from rl_core.transports.rpc_wire import finite_seconds

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""How long after the first failure the other ranks may still end before the failure is raised."""
_WARN_AT = (0.1, 0.5)
_QUIET_SECONDS = 5.0
"""Waits are not warned about earlier than this."""


class CallCancelled(RLJobError, concurrent.futures.CancelledError):
    """The caller cancelled the call."""


class WorkerErrors(ExceptionGroup[Exception], RLJobError):
    """Several ranks failed; each error is as it would be alone."""


class Call(Protocol):
    """One rank's part. Implemented over an RPC future by `cluster.PendingCall`."""

    future: "concurrent.futures.Future[MethodResult]"

    def describe(self) -> str:
        """Return who this is and what it last did, for an error that lists it as missing."""

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
        self._condition = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        for call in self._calls.values():
            call.future.add_done_callback(self._on_done)

    def __await__(self) -> Any:
        return self.async_wait().__await__()

    @property
    def ranks(self) -> list[int]:
        """Return the ranks called."""
        return list(self._calls)

    def done(self) -> bool:
        """Return whether every rank has ended or the call was cancelled."""
        return self._cancelled or all(call.future.done() for call in self._calls.values())

    def cancel(self) -> None:
        """Give up on all ranks that have not ended; waiters get CallCancelled."""
        if self.done():
            return
        self._cancelled = True
        for call in self._calls.values():
            call.cancel()
        self._wake()

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order. `timeout` None = until `deadlines.groupMethod` after the call began.

        Raises the failure of a rank (several: an ExceptionGroup) once all ranks ended or 5 s after the first one failed,
        DeadlineExceeded naming the missing ranks, CallCancelled; RuntimeError on an event-loop thread.
        """
        _refuse_on_event_loop(self)
        watch = _Watch(self, timeout)
        with self._condition:
            while (pause := watch.next_pause()) is not None:
                self._condition.wait(pause)
        return self._outcome(watch)

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order, as `wait`; cancelling the task leaves the call running."""
        watch = _Watch(self, timeout)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._condition:
            self._wakers.append(wake)
        try:
            while (pause := watch.next_pause()) is not None:
                changed.clear()
                if watch.next_pause() is None:
                    break
                try:
                    await asyncio.wait_for(changed.wait(), pause)
                except TimeoutError:
                    continue
        finally:
            with self._condition:
                self._wakers.remove(wake)
        return self._outcome(watch)

    def consume_duration(self, reduction: Literal["max", "min", "mean"] = "max") -> float:
        """Return the seconds the method took, reduced over ranks; 0.0 when they were consumed before. Waits for the end."""
        reduce = _reduction(reduction)
        return reduce([durations.get(self.method, 0.0) for durations in self._take_durations()])

    def consume_durations(
        self, return_per_rank: bool = False, *, reduction: Literal["max", "min", "mean"] = "max"
    ) -> Any:
        """Return seconds by timer tag, the method's own under its name, reduced over ranks; with `return_per_rank` also [rank] of maps.

        Consumed once, then 0.0. Waits for the end.
        """
        reduce = _reduction(reduction)
        per_rank = self._take_durations()
        tags = sorted({tag for durations in per_rank for tag in durations})
        reduced = {tag: reduce([durations.get(tag, 0.0) for durations in per_rank]) for tag in tags}
        return (reduced, per_rank) if return_per_rank else reduced

    def _take_durations(self) -> list[dict[str, float]]:
        self.wait()
        taken = [dict(call.future.result().durations) for call in self._calls.values()]
        if self._consumed:
            return [dict.fromkeys(durations, 0.0) for durations in taken]
        self._consumed = True
        return taken

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_done(self, future: "concurrent.futures.Future[MethodResult]") -> None:
        if not future.cancelled() and future.exception() is not None and self._failed_at is None:
            self._failed_at = self._clock()
        self._wake()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def _missing(self) -> list[Call]:
        return [call for call in self._calls.values() if not call.future.done()]

    def _outcome(self, watch: "_Watch") -> list[Any]:
        if self._cancelled:
            raise CallCancelled(f"{self.group}.{self.method} was cancelled after {self._clock() - self._began:.1f} s")
        errors = [
            e for call in self._calls.values() if call.future.done() and (e := _error_of(call.future)) is not None
        ]
        if errors:
            first = f"{type(errors[0]).__name__}: {errors[0]}".partition("\n")[0]
            told = f"{self.group}.{self.method} failed on {len(errors)} of {len(self._calls)} ranks, the first: {first}"
            raise _combined(told, errors)
        missing = self._missing()
        if missing:
            waited = self._clock() - self._began
            names = "; ".join(call.describe() for call in missing)
            raise DeadlineExceeded(
                f"{self.group}.{self.method} must end on {len(self._calls)} ranks within {watch.timeout:.1f} s, "
                f"missing after {waited:.1f} s: {names}"
            )
        return [call.future.result().value for call in self._calls.values()]


class _Watch:
    """One wait: when to look again, when to warn, when it is over."""

    def __init__(self, result: WorkerGroupFuncResult, timeout: float | None) -> None:
        self.timeout = result._default_timeout if timeout is None else finite_seconds(timeout)
        self._result = result
        self._began = result._began if timeout is None else result._clock()
        self._warnings = [share * self.timeout for share in _WARN_AT if share * self.timeout >= _QUIET_SECONDS]

    def next_pause(self) -> float | None:
        """Return how long to sleep unless woken; None when the wait is over."""
        result = self._result
        if result.done():
            return None
        now = result._clock()
        end = self._began + self.timeout
        if result._failed_at is not None:
            end = min(end, result._failed_at + result._settle)
        if now >= end:
            return None
        while self._warnings and now - self._began >= self._warnings[0]:
            self._warnings.pop(0)
            names = "; ".join(call.describe() for call in result._missing())
            logger.warning(
                "%s.%s has been waited for %.0f of %.0f s; missing: %s",
                result.group,
                result.method,
                now - self._began,
                self.timeout,
                names,
            )
        return min(min(end, self._began + self._warnings[0] if self._warnings else end) - now, threading.TIMEOUT_MAX)


def _error_of(future: "concurrent.futures.Future[MethodResult]") -> Exception | None:
    error = future.exception()
    return error if isinstance(error, Exception) else None


def _combined(message: str, errors: Sequence[Exception]) -> Exception:
    return errors[0] if len(errors) == 1 else WorkerErrors(message, errors)


def _reduction(name: str) -> Callable[[list[float]], float]:
    reductions: dict[str, Callable[[list[float]], float]] = {
        "max": max,
        "min": min,
        "mean": lambda values: sum(values) / len(values),
    }
    if name not in reductions:
        raise ValueError(f"reduction must be one of {sorted(reductions)}, got {name!r}")
    return reductions[name]


def _refuse_on_event_loop(result: WorkerGroupFuncResult) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"wait() of {result.group}.{result.method} blocks and was called on an event-loop thread; use async_wait()"
    )
