"""What a consumer holds: `Delivery` (an item on lease) and `AsyncHandle` (an operation under way)."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from rl_core.api.errors import DeadlineExceeded
from rl_core.channel.backend import Backend, Taken
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.transports.sockets import IoThread

Value = TypeVar("Value")
Future = concurrent.futures.Future


def wait_sync(start: Callable[[], "Future[Value]"], what: str) -> Value:
    """Start an operation and return its result, blocking. Raises RuntimeError on an event-loop thread, before the start."""
    refuse_on_event_loop(what)
    return start().result()


async def wait_async(future: "Future[Value]") -> Value:
    """Return the future's result; cancellation cancels the operation."""
    return await asyncio.wrap_future(future)


def let_go(future: "Future[Any]") -> None:
    """Leave an operation to itself."""


class AsyncHandle(Generic[Value]):
    """An operation under way. Dropped before it was waited for, a take gives its items back."""

    def __init__(
        self, future: "Future[Any]", receive: Callable[[Any], Value], abandon: Callable[["Future[Any]"], None]
    ) -> None:
        self._future = future
        self._receive = receive
        self._abandon = abandon
        self._received = False
        self._value: Value | None = None
        self._error: Exception | None = None
        """Why the outcome could not be received, for whoever waits again."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, blocking; DeadlineExceeded after `timeout` (None = the operation's own), it may be waited for again."""
        refuse_on_event_loop("AsyncHandle.wait")
        try:
            outcome = self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._future.done():
                raise
            raise DeadlineExceeded(f"the operation did not end within {timeout:g} s; it goes on") from error
        return self._take(outcome)

    async def async_wait(self, timeout: float | None = None) -> Any:
        """Return the result; as `wait` for coroutines. Cancelling the waiter leaves the operation as it is."""
        try:
            outcome = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._future)), timeout)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise DeadlineExceeded(f"the operation did not end within {timeout:g} s; it goes on") from error
        return self._take(outcome)

    def _take(self, outcome: Any) -> Value | None:
        if not self._received:
            self._received = True
            try:
                self._value = self._receive(outcome)
            except Exception as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return self._value

    def __del__(self) -> None:
        if not self._received:  # the collector may run anywhere, under any lock: the work is done elsewhere
            IoThread.shared().call_soon(self._abandon, self._future)


class Delivery:
    """An item on lease, renewed while this object lives. As a context manager: ack at the end, nack on an exception."""

    def __init__(self, backend: Backend, taken: Taken, item: Any) -> None:
        self.item = item
        self.token = taken.token
        self.attempt = taken.attempt
        """1 + consumers lost with it."""
        self.weight = taken.weight
        self.backend = backend

    def ack(self) -> bool:
        """Delete the item for good; False when this lease had ended already."""
        return bool(wait_sync(lambda: self.backend.control("ack", self.token), "Delivery.ack"))

    def nack(self, delay: float = 0) -> bool:
        """Return the item to its place, after `delay` seconds; False when this lease had ended already. Counts no attempt."""
        return bool(wait_sync(lambda: self.backend.control("nack", self.token, delay), "Delivery.nack"))

    def extend(self, seconds: float) -> bool:
        """Let the lease run at least `seconds` from now; False when it had ended already."""
        return bool(wait_sync(lambda: self.backend.control("extend", self.token, seconds), "Delivery.extend"))

    async def ack_async(self) -> bool:
        """Return `ack()` from a coroutine."""
        return bool(await wait_async(self.backend.control("ack", self.token)))

    async def nack_async(self, delay: float = 0) -> bool:
        """Return `nack(delay)` from a coroutine."""
        return bool(await wait_async(self.backend.control("nack", self.token, delay)))

    async def extend_async(self, seconds: float) -> bool:
        """Return `extend(seconds)` from a coroutine."""
        return bool(await wait_async(self.backend.control("extend", self.token, seconds)))

    def __enter__(self) -> "Delivery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.ack()
        else:
            self.nack()

    async def __aenter__(self) -> "Delivery":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.ack_async()
        else:
            await self.nack_async()
