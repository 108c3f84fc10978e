"""The objects that the rules of a channel (`core`) act on: items, waiting puts and takes, and the state of one key."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.messages.channel import Key

MOST_BYTES = 1 << 20
"""A take without a target adds no further item once it has this many bytes: consumers process large items one at a time."""


class Client(Hashable, Protocol):
    """A process that puts and takes. Compared by identity."""

    @property
    def name(self) -> str:
        """Name of the process in error messages."""


@dataclass(slots=True, eq=False)
class Item:
    """One accepted item. STORED -> delivered to a consumer -> deleted, or back to STORED."""

    number: int
    """Position in the order of acceptance."""
    key: Key
    payload: Any
    nbytes: int
    weight: float
    stored_at: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivered item. The consumer confirms its `token`, which deletes it; if it is lost, it returns to the head of the queue."""

    token: str
    payload: Any


@dataclass(slots=True, eq=False, weakref_slot=True)
class Take:
    """A waiting or finished take.

    Each callback is called at most once, with the take as its argument. Callbacks therefore need no reference to the take, which avoids
    reference cycles: a take that has ended is freed at once, together with its payload.
    """

    client: Client
    key: Key
    on_items: Callable[["Take", list[Delivery]], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    target: float | None = None
    """Weight of a batch. None takes up to `most` items of any weight, fewer if there are not so many or if they are large."""
    most: int = 1
    allow_oversize: bool = False
    held: list[Item] = field(default_factory=list)
    """Items collected so far for a batch."""
    weight: tuple[float, ...] = ()
    """Partial sums of the weight collected so far (see `add_exactly`)."""
    open: bool = True
    out: dict[str, Item] = field(default_factory=dict)
    """Delivered items that are neither confirmed nor returned, by token."""

    @property
    def waits(self) -> bool:
        """Whether the take has not ended."""
        return self.open

    def pick(self, items: deque[Item]) -> bool:
        """Move items that belong to this take from the head of `items` to it. Returns whether the take is complete."""
        if self.target is None:
            self._pick_available(items)
            return bool(self.held)
        while items:
            if not self._fits(items[0].weight, self.target):
                if self.allow_oversize and not self.held:
                    self.held.append(items.popleft())
                return True
            self.held.append(items.popleft())
            self.weight = add_exactly(self.weight, self.held[-1].weight)
            if math.fsum(self.weight) >= self.target:
                return True
        return False

    def _pick_available(self, items: deque[Item]) -> None:
        nbytes = 0
        while items and len(self.held) < self.most and nbytes < MOST_BYTES:
            self.held.append(items.popleft())
            nbytes += self.held[-1].nbytes

    def _fits(self, weight: float, target: float) -> bool:
        try:
            return math.fsum((*self.weight, weight)) <= target
        except OverflowError:  # the sum is larger than any float, so larger than the target
            return False


@dataclass(slots=True, eq=False, weakref_slot=True)
class Put:
    """A waiting put, or one that has room and no payload yet. For its callbacks see Take."""

    client: Client
    key: Key
    nbytes: int
    on_room: Callable[["Put"], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    open: bool = True
    admitted: bool = False
    """Whether it has room; its payload is still to come."""

    @property
    def waits(self) -> bool:
        """Whether it waits for room."""
        return self.open and not self.admitted


class KeyQueue:
    """The state of one key."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.takes: deque[Take] = deque()
        self.puts: deque[Put] = deque()
        self.filling: set[Client] = set()
        """Clients that were granted room and have not sent the item yet. Their next put waits for it, which keeps the order of their puts."""
        self.pumping = False
        """Whether waiting operations are being served. Changes that a callback makes meanwhile are handled by the loop that has called it."""
        self.closed = False
        self.error: Exception | None = None

    @property
    def can_be_deleted(self) -> bool:
        """Whether the key can be deleted: no items, no waiting operations, not closed."""
        return not (self.items or self.takes or self.puts or self.filling or self.pumping or self.closed)

    def insert(self, items: Iterable[Item]) -> None:
        """Put returned items back to their former positions, before all that were accepted later."""
        for item in sorted(items, key=lambda item: item.number, reverse=True):
            earlier = []
            while self.items and self.items[0].number < item.number:
                earlier.append(self.items.popleft())
            self.items.appendleft(item)
            self.items.extendleft(reversed(earlier))


def add_exactly(parts: tuple[float, ...], number: float) -> tuple[float, ...]:
    """Return `parts` with `number` added: a few floats whose exact sum is that of all numbers added so far.

    `math.fsum` of them is the correctly rounded sum, so that ten times 0.1 gives 1.0. Source: Shewchuk, "Adaptive precision floating-point
    arithmetic" (1997).
    """
    partials = []
    for partial in parts:
        high = number + partial
        large, small = (number, partial) if abs(number) >= abs(partial) else (partial, number)
        if low := small - (high - large):
            partials.append(low)
        number = high
    return (*partials, number)
