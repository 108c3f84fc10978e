"""The work queue between events and `reconcile`: which job is looked at, when, and by whom.

Four promises: a key added many times while it waits is handled once; a key is never handled twice at the same time (added
meanwhile, it is handled again afterwards); a key that fails waits longer each time, and no other key waits with it; a key that asks
for one turn after another is slowed down. Pure asyncio, on the loop's own clock, so that a test with a fake loop time sees minutes
pass in no time.

            add(key) ----------> ready ----> worker 1..N ----> handle(key)
    add_after(key, s) -> delayed --^                              |
                            ^--- back-off, requeue_after <--------+
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 60.0
"""Seconds; the pause doubles from the first to the longest, each times a factor of 0.5 to 1."""
FREE_REPEATS = 10
"""Times in a row that a key may ask to be handled again at once: an intent, its effects and what came of them are a few."""
FIRST_INTERVAL, LONGEST_INTERVAL = 1.0, 30.0
"""Seconds between two turns of a key that asks for more than that, doubling: nothing it does helps, and it must not take the workers."""


class QueueObserver(Protocol):
    """Who counts what the queue does; implemented by `metrics.Metrics`."""

    def added(self) -> None:
        """A key began to wait."""

    def started(self, waited: float) -> None:
        """A worker took a key that had waited so many seconds."""

    def finished(self, seconds: float, result: str) -> None:
        """A key was handled; the result is `success` or `error`."""

    def retried(self) -> None:
        """A key failed and will be handled again."""


class _Silent:
    def added(self) -> None: ...
    def started(self, waited: float) -> None: ...
    def finished(self, seconds: float, result: str) -> None: ...
    def retried(self) -> None: ...


class WorkQueue(Generic[K]):
    """Deduplicating queue of keys with delays and per-key back-off."""

    def __init__(
        self,
        *,
        observer: QueueObserver | None = None,  # None = nobody counts
        expected: tuple[type[Exception], ...] = (),
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
        now: Callable[[], float] | None = None,  # None = the running loop's clock
    ) -> None:
        self._observer = observer or _Silent()
        self._expected = expected
        """Failures of the world around us, logged without a traceback."""
        self._jitter = jitter
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._ready: deque[K] = deque()
        self._since: dict[K, float] = {}
        """When a waiting key was added; its keys are those in `_ready`, and those to be handled again after the current time."""
        self._busy: set[K] = set()
        self._delayed: dict[K, float] = {}
        """Earliest due time of a key that waits for a time."""
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self._held: dict[K, float] = {}
        """When a key that failed, or asked for too many turns, may be handled again."""
        self._repeats: dict[K, int] = {}
        """Turns in a row after which a key asked for another at once."""
        self._wake_workers = asyncio.Event()
        self._wake_timer = asyncio.Event()

    def __len__(self) -> int:
        """Return how many keys wait for a worker."""
        return len(self._ready)

    @property
    def delayed(self) -> int:
        """How many keys wait for their time."""
        return len(self._delayed)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a worker or is being handled (keys that wait for a time do not count)."""
        return not self._ready and not self._busy and not self._since

    def add(self, key: K) -> None:
        """Have the key handled as soon as a worker is free; one that backs off when that is over, whatever happens meanwhile.

        Else every event of a job, and every poll of its runner, would repeat the request that fails.
        """
        if key in self._since:
            return
        held = self._held.get(key, 0.0) - self._now()
        if held > 0:
            self.add_after(key, held)
            return
        self._delayed.pop(key, None)
        self._since[key] = self._now()
        self._observer.added()
        if key not in self._busy:
            self._ready.append(key)
            self._wake_workers.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Have the key handled in so many seconds; an earlier time already set stays."""
        if seconds <= 0:
            self.add(key)
            return
        due = self._now() + seconds
        if key in self._since or self._delayed.get(key, float("inf")) <= due:
            return
        self._delayed[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._wake_timer.set()

    async def run(self, handle: Callable[[K], Awaitable[float | None]], *, workers: int) -> None:
        """Handle keys until cancelled; `handle` returns after how many seconds it wants the key again, or None."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._release_delayed(), name="queue timer")
            for index in range(workers):
                group.create_task(self._work(handle), name=f"queue worker {index}")

    async def _work(self, handle: Callable[[K], Awaitable[float | None]]) -> None:
        while True:
            while not self._ready:
                self._wake_workers.clear()
                await self._wake_workers.wait()
            key = self._ready.popleft()
            self._observer.started(self._now() - self._since.pop(key))
            self._busy.add(key)
            began = self._now()
            try:
                again = await handle(key)
            except Exception as error:  # noqa: BLE001 - the task boundary: one job's failure is its own
                self._observer.finished(self._now() - began, "error")
                again = self._fail(key, error)
            else:
                self._observer.finished(self._now() - began, "success")
                self._failures.pop(key, None)
                self._held.pop(key, None)
                again = self._slowed(key, again)
            finally:
                self._busy.discard(key)
            if key in self._since and key not in self._held:  # added while it was handled
                self._ready.append(key)
                self._wake_workers.set()
            elif again is not None:
                self._since.pop(key, None)
                self.add_after(key, again)

    def _slowed(self, key: K, again: float | None) -> float | None:
        """Return when a key that wants another turn in `again` seconds gets it."""
        if again is None or again > 0:
            self._repeats.pop(key, None)
            return again
        repeats = self._repeats[key] = self._repeats.get(key, 0) + 1
        if repeats <= FREE_REPEATS:
            return again
        pause = min(FIRST_INTERVAL * 2.0 ** min(repeats - FREE_REPEATS - 1, 20), LONGEST_INTERVAL)
        self._held[key] = self._now() + pause
        return pause

    def _fail(self, key: K, error: Exception) -> float:
        """Count the failure and return the pause before the next try, in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(FIRST_BACKOFF * 2.0 ** min(failures - 1, 20), LONGEST_BACKOFF) * self._jitter()
        self._held[key] = self._now() + pause
        self._observer.retried()
        logger.warning(
            "handling %s failed %d times, again in %.1f s: %r",
            key,
            failures,
            pause,
            error,
            exc_info=self._traced(error),
        )
        return pause

    def _traced(self, error: Exception) -> Exception | None:
        return None if isinstance(error, self._expected) else error

    async def _release_delayed(self) -> None:
        while True:
            self._wake_timer.clear()
            wait = self._release_due()
            try:
                async with asyncio.timeout(wait):
                    await self._wake_timer.wait()
            except TimeoutError:
                continue

    def _release_due(self) -> float | None:
        """Add the keys whose time has come; return the seconds until the next, or None without any."""
        now = self._now()
        while self._heap:
            due, _, key = self._heap[0]
            if self._delayed.get(key) != due:  # handled meanwhile, or set to an earlier time
                heapq.heappop(self._heap)
            elif due <= now:
                heapq.heappop(self._heap)
                self.add(key)
            else:
                return due - now
        return None
