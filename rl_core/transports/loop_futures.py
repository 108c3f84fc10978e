"""How a coroutine waits for a future that another thread completes, such as the reply of a call."""

import asyncio
import concurrent.futures
import contextlib
import weakref
from collections import deque
from typing import ClassVar, TypeVar

from rl_core.transports.interrupts import Interrupts

Value = TypeVar("Value")


class _Completions:
    """Completes futures of one event loop from other threads.

    All futures that are completed before the loop runs share one wake-up of the loop, because each wake-up is a system call.
    """

    _by_loop: ClassVar["weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Completions]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._completed: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "_Completions":
        """Return the instance of the running `loop`."""
        completions = cls._by_loop.get(loop)
        if completions is None:
            completions = cls._by_loop[loop] = cls(loop)
        return completions

    def complete(self, future: "asyncio.Future[None]") -> None:
        """Complete `future` on the loop. Does nothing when the loop is closed. Thread-safe."""
        self._completed.append(future)
        if self._scheduled:
            return
        loop = self._loop()
        if loop is None:
            return
        with Interrupts.deferred(), contextlib.suppress(RuntimeError):  # closed
            self._scheduled = True
            loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # before the look at the queue: whoever appends later schedules the next run
        while self._completed:
            future = self._completed.popleft()
            if not future.done():
                future.set_result(None)


async def wait_future(future: "concurrent.futures.Future[Value]") -> Value:
    """Wait for `future` and return its result. Cancelling the waiting task cancels the future, as with `asyncio.wrap_future`."""
    loop = asyncio.get_running_loop()
    completions, completed = _Completions.of(loop), loop.create_future()
    future.add_done_callback(lambda _: completions.complete(completed))
    try:
        await completed
    except asyncio.CancelledError:
        future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result()
