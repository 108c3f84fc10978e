"""The work queue between events and `reconcile`. It decides which job is reconciled when.

The queue keeps four guarantees. A key that is added many times while it waits is handled once. A key is never handled by two workers at
the same time: when it is added while it is handled, it is handled again afterwards. A key that fails is retried with exponential
back-off, which delays no other key. A key that asks for an immediate requeue again and again is slowed down. The queue uses asyncio and
the clock of the loop only, so tests run on a fake loop time.

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

from rljob_operator.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 60.0
"""Seconds between retries of a key that fails, each multiplied by a random factor of 0.5 to 1."""
FREE_REPEATS = 10
"""Immediate requeues in a row that are not slowed down. A reconcile that writes its intent, acts and reads the result needs a few."""
FIRST_INTERVAL, LONGEST_INTERVAL = 1.0, 30.0
"""Seconds between two requeues of a key that asks for more than that. Such a key makes no progress and must not occupy the workers."""


class QueueObserver(Protocol):
    """Observes the queue for the metrics; implemented by `metrics.Metrics`."""

    def added(self) -> None:
        """A key was added."""

    def started(self, waited: float) -> None:
        """A worker took a key that had waited for `waited` seconds."""

    def finished(self, seconds: float, result: str) -> None:
        """A key was handled in `seconds`; the result is `success` or `error`."""

    def retried(self) -> None:
        """A key failed and will be handled again."""


class _NoObserver:
    def added(self) -> None: ...
    def started(self, waited: float) -> None: ...
    def finished(self, seconds: float, result: str) -> None: ...
    def retried(self) -> None: ...


class WorkQueue(Generic[K]):
    """Deduplicating queue of keys with delays and per-key back-off."""

    def __init__(
        self,
        *,
        observer: QueueObserver | None = None,  # None = no metrics
        expected: tuple[type[Exception], ...] = (),
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
        now: Callable[[], float] | None = None,  # None = the running loop's clock
    ) -> None:
        self._observer = observer or _NoObserver()
        self._expected = expected
        """Exceptions of the environment, which are logged without a traceback."""
        self._jitter = jitter
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._ready: deque[K] = deque()
        self._added_at: dict[K, float] = {}
        """When a waiting key was added. Holds the keys of `_ready`, and those that were added while they are handled."""
        self._busy: set[K] = set()
        self._delayed: dict[K, float] = {}
        """Earliest due time of a delayed key."""
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, Backoff] = {}
        """Keys whose last handling failed."""
        self._requeues: dict[K, Backoff] = {}
        """Keys that asked for an immediate requeue the last time they were handled without a failure."""
        self._wake_workers = asyncio.Event()
        self._wake_timer = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that wait for a worker."""
        return len(self._ready)

    @property
    def delayed(self) -> int:
        """Number of delayed keys, which wait for their due time."""
        return len(self._delayed)

    @property
    def idle(self) -> bool:
        """Whether no key waits for a worker or is being handled. Delayed keys do not count."""
        return not self._ready and not self._busy and not self._added_at

    def add(self, key: K) -> None:
        """Add a key, to be handled as soon as a worker is free.

        A key in back-off is handled when its pause is over, however often it is added. Otherwise every event of a job, and every poll of
        its runner, would repeat the request that fails.
        """
        if key in self._added_at:
            return
        if (pause := self._backoff_remaining(key)) > 0:
            self.add_after(key, pause)
            return
        self._delayed.pop(key, None)
        self._added_at[key] = self._now()
        self._observer.added()
        if key not in self._busy:
            self._ready.append(key)
            self._wake_workers.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Add a key after `seconds`. An earlier due time of the key stays."""
        if seconds <= 0:
            self.add(key)
            return
        due_at = self._now() + seconds
        if key in self._added_at or self._delayed.get(key, float("inf")) <= due_at:
            return
        self._delayed[key] = due_at
        self._sequence += 1
        heapq.heappush(self._heap, (due_at, self._sequence, key))
        self._wake_timer.set()

    async def run(self, handle: Callable[[K], Awaitable[float | None]], *, workers: int) -> None:
        """Handle keys until cancelled. `handle` returns the seconds after which the key is requeued, None = not at all."""
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
            self._observer.started(self._now() - self._added_at.pop(key))
            self._busy.add(key)
            start = self._now()
            try:
                requeue_after = await handle(key)
            except Exception as error:  # noqa: BLE001 - task boundary: the failure of one job must not end the worker
                self._observer.finished(self._now() - start, "error")
                requeue_after = self._fail(key, error)
            else:
                self._observer.finished(self._now() - start, "success")
                self._failures.pop(key, None)
                requeue_after = self._limit_requeues(key, requeue_after)
            finally:
                self._busy.discard(key)
            if key in self._added_at and not self._backoff_remaining(key):  # The key was added while it was handled.
                self._ready.append(key)
                self._wake_workers.set()
            elif requeue_after is not None:
                self._added_at.pop(key, None)
                self.add_after(key, requeue_after)

    def _backoff_remaining(self, key: K) -> float:
        """Return the seconds until a key that failed, or asked for too many immediate requeues, may be handled again."""
        now = self._now()
        backoffs = (self._failures.get(key), self._requeues.get(key))
        return max((backoff.remaining(now) for backoff in backoffs if backoff is not None), default=0.0)

    def _limit_requeues(self, key: K, requeue_after: float | None) -> float | None:
        """Return the seconds after which a key that asks for `requeue_after` is requeued."""
        if requeue_after is None or requeue_after > 0:
            self._requeues.pop(key, None)
            return requeue_after
        backoff = self._requeues.setdefault(
            key, Backoff(first=FIRST_INTERVAL, longest=LONGEST_INTERVAL, free_attempts=FREE_REPEATS)
        )
        return backoff.step(self._now())

    def _fail(self, key: K, error: Exception) -> float:
        """Count the failure and return the pause before the retry, in seconds."""
        backoff = self._failures.setdefault(
            key, Backoff(first=FIRST_BACKOFF, longest=LONGEST_BACKOFF, jitter=self._jitter)
        )
        pause = backoff.step(self._now())
        self._observer.retried()
        logger.warning(
            "handling %s failed %d times, retrying in %.1f s: %r",
            key,
            backoff.attempts,
            pause,
            error,
            exc_info=None if isinstance(error, self._expected) else error,
        )
        return pause

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
        """Add the delayed keys that are due. Return the seconds until the next one, None when there is none."""
        now = self._now()
        while self._heap:
            due_at, _, key = self._heap[0]
            if self._delayed.get(key) != due_at:  # The key was handled already, or moved to an earlier time.
                heapq.heappop(self._heap)
            elif due_at <= now:
                heapq.heappop(self._heap)
                self.add(key)
            else:
                return due_at - now
        return None
