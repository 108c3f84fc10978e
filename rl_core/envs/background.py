"""`BackgroundPool`: an `EnvPool` with an event loop and a thread of its own, for use from any thread or event loop.

The kernel kills an env child when the thread that started it ends; this thread lives as long as the pool.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_core.envs.pool import EnvPool
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow

T = TypeVar("T")


class BackgroundPool:
    """Runs one pool in the background. Thread-safe."""

    def __init__(self, pool: EnvPool) -> None:
        """Start the pool's processes and wait for them. Raises what `EnvPool.start` raises."""
        self.pool = pool
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="env-pool", daemon=True)
        self._thread.start()
        try:
            self._submit(pool.start()).result()
        except BaseException:
            self._stop_loop()
            raise

    async def step_rows(self, rows: list[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return the pool's answers; if the call is cancelled, the rows are dropped."""
        return await asyncio.wrap_future(self._submit(self.pool.step_rows(rows)))

    def close(self) -> None:
        """Kill the processes and end the thread; idempotent."""
        if self._thread.is_alive():
            self._submit(self.pool.close()).result()
            self._stop_loop()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
