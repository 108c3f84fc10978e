"""`LoopThread`: an event loop on a thread of its own, for coroutines that compute between their messages."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines that may block on an event loop of their own, so that the event loop of the RPC handlers is not blocked.

    They run one at a time, in the order in which they were submitted. A coroutine that was cancelled ends before the next one begins.
    """

    def __init__(self, name: str) -> None:
        """Start a daemon thread that runs an event loop. `name` is the name of the thread in stack dumps."""
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Run `work` on the thread; return a future of the caller's event loop. Cancelling it cancels `work`."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._in_turn(work), self._loop))

    def close(self) -> None:
        """Cancel what runs and end the thread, without waiting for either. May be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._turn:
                return await work
        finally:
            work.close()  # Has an effect only if the work was cancelled before its turn.

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks))
        finally:
            self._loop.close()
