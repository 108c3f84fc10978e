"""A bounded number of slots for concurrent work, shared fairly between keys."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairSlots(Generic[K]):
    """A semaphore with at most `total` holders, and at most `per_key` for each key. Freed slots are given to the waiting keys in turn.

    The pods of a large job therefore do not delay those of a small one.
    """

    def __init__(self, *, total: int, per_key: int) -> None:
        self._free = total
        self._per_key = per_key
        self._num_held: dict[K, int] = {}
        self._waiting: OrderedDict[K, deque[asyncio.Future[None]]] = OrderedDict()
        """Keys with waiters; the one whose turn is next stands first."""

    @asynccontextmanager
    async def hold(self, key: K) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block."""
        await self._acquire(key)
        try:
            yield
        finally:
            self._release(key)

    async def _acquire(self, key: K) -> None:
        if self._free > 0 and self._num_held.get(key, 0) < self._per_key and key not in self._waiting:
            self._take(key)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # The slot was granted at the moment of the cancellation.
                self._release(key)
            else:
                self._leave(key, waiter)
            raise

    def _take(self, key: K) -> None:
        self._free -= 1
        self._num_held[key] = self._num_held.get(key, 0) + 1

    def _release(self, key: K) -> None:
        self._free += 1
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free slots to the waiting keys in turn, except keys that hold `per_key` slots."""
        for key in list(self._waiting):
            if self._free <= 0:
                return
            if self._num_held.get(key, 0) >= self._per_key:
                continue
            waiters = self._waiting[key]
            while waiters and waiters[0].done():  # The task of this waiter was cancelled and has not run since.
                waiters.popleft()
            if waiters:
                self._take(key)
                waiters.popleft().set_result(None)
            if waiters:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]

    def _leave(self, key: K, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(key)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
