"""The deadlines of puts and takes that wait in a channel."""

import heapq
import itertools
import math
import weakref

from rl_core.channel.model import Put, Take

SWEEP_AT = 64
"""Number of entries below which ended operations are not removed."""


class DeadlineHeap:
    """A heap of operations by deadline, with O(log n) access to the next one.

    An operation that has ended is skipped when it reaches the top. When ended operations may outnumber the others, all of them are removed.
    Operations are referenced weakly, so that the payload of an ended one is freed before its deadline.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Put | Take]]] = []
        self._numbers = itertools.count()
        """Keeps entries of one deadline in the order in which they came."""
        self._sweep_at = SWEEP_AT

    def add(self, operation: Put | Take) -> None:
        """Add `operation` with its deadline."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if _waits(entry[2]())]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEEP_AT, 2 * len(self._heap))
        heapq.heappush(self._heap, (operation.deadline, next(self._numbers), weakref.ref(operation)))

    def next_deadline(self) -> float:
        """Return the earliest deadline of a waiting operation; infinity if there is none."""
        while self._heap and not _waits(self._heap[0][2]()):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop_overdue(self, now: float) -> list[Put | Take]:
        """Remove and return the waiting operations whose deadline is at most `now`, the earliest first."""
        overdue = []
        while self.next_deadline() <= now:
            operation = heapq.heappop(self._heap)[2]()
            if operation is not None:
                overdue.append(operation)
        return overdue


def _waits(operation: Put | Take | None) -> bool:
    return operation is not None and operation.waits
