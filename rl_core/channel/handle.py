"""Waits for an operation of a channel: blocking, in a coroutine, or later through an `AsyncHandle`."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rl_core.api.errors import DeadlineExceeded
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.transports.sockets import IoThread

Value = TypeVar("Value")
Future = concurrent.futures.Future
CancelledError = concurrent.futures.CancelledError


def wait_sync(start: Callable[[], "Future[Value]"], what: str) -> Value:
    """Start an operation and block until its result is there. Raises RuntimeError on an event-loop thread, before the start."""
    refuse_on_event_loop(what)
    return start().result()


def detach(future: "Future[Any]") -> None:
    """Do nothing. Passed to an AsyncHandle as `abandon` for operations that continue when nobody waits for them."""


class AsyncHandle(Generic[Value]):
    """An operation in progress. If the handle of a take is deleted before its result was read, the items return to the queue."""

    def __init__(
        self, future: "Future[Any]", receive: Callable[[Any], Value], abandon: Callable[["Future[Any]"], None]
    ) -> None:
        """Follow `future`.

        `receive` turns its result into the value of `wait`. `abandon(future)` is called when the handle is deleted before the result was
        read.
        """
        self._future = future
        self._receive = receive
        self._abandon = abandon
        self._receive_lock = threading.Lock()
        """Guards the fields below: if several threads wait, the first one receives the value and the others return it too."""
        self._received = False
        self._value: Value | None = None
        self._error: Exception | None = None
        """Error because of which the result could not be received. It is raised again by later waits."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._future.done()

    def add_done_callback(self, function: Callable[[], object]) -> None:
        """Call `function()` when the operation has ended, on any thread; at once if it has. It must not block."""
        self._future.add_done_callback(lambda future: function())

    def cancel(self) -> None:
        """Give up an operation whose result was not read. Items of a take return to the queue; a put is not undone."""
        with self._receive_lock:
            is_abandoned, self._received = not self._received, True
        if is_abandoned:
            self._error = CancelledError("the operation was given up")
            self._abandon(self._future)

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its result.

        Raises DeadlineExceeded after `timeout` seconds (None: the timeout of the operation itself); the operation then continues and can be
        waited for again.
        """
        refuse_on_event_loop("AsyncHandle.wait")
        try:
            result = self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._future.done():  # in the meantime, or with a deadline of its own
                return self._take(self._future.result())
            raise DeadlineExceeded(f"the operation did not end within {timeout:g} s; it goes on") from error
        return self._take(result)

    async def async_wait(self, timeout: float | None = None) -> Any:
        """Return the result as `wait` does, in a coroutine. Cancelling the waiting task does not cancel the operation."""
        try:
            result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._future)), timeout)
        except TimeoutError as error:
            if self._future.done():  # in the meantime, or with a deadline of its own
                return self._take(self._future.result())
            raise DeadlineExceeded(f"the operation did not end within {timeout:g} s; it goes on") from error
        return self._take(result)

    def _take(self, result: Any) -> Value | None:
        with self._receive_lock:
            if not self._received:
                self._received = True
                try:
                    self._value = self._receive(result)
                except Exception as error:
                    self._error = error
                    raise
        if self._error is not None:
            raise self._error
        return self._value

    def __del__(self) -> None:
        if not self._received:  # the collector may run anywhere, under any lock: the work is done elsewhere
            IoThread.shared().call_soon(self._abandon, self._future)
