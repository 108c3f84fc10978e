"""What the rules of a channel act on: items, waiting puts and takes, the state of one key. See `core`."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.messages.channel import Key

MOST_BYTES = 1 << 20
"""Bytes from which a take without a target waits for no further item: large ones are worked on one by one while the next travels."""


class Client(Hashable, Protocol):
    """Who puts and takes: one process. Compared by identity."""

    @property
    def name(self) -> str:
        """Return what errors call it."""


@dataclass(slots=True, eq=False)
class Item:
    """One accepted item. STORED -> with a consumer -> gone, or back to STORED."""

    number: int
    """Place in the order of acceptance."""
    key: Key
    payload: Any
    nbytes: int
    weight: float
    stored_at: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """An item in its consumer's hands: deleted when the consumer confirms the token, back at the head when it is lost."""

    token: str
    payload: Any


@dataclass(slots=True, eq=False, weakref_slot=True)
class Take:
    """A waiting or finished take. A callback is called at most once, with the take, which it need not refer to itself.

    So no operation is part of a cycle: what has ended is gone at once, with its payload.
    """

    client: Client
    key: Key
    on_items: Callable[["Take", list[Delivery]], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    target: float | None = None
    """Weight of a batch; None = `most` items of any weight, fewer where there are not so many or they are large."""
    most: int = 1
    allow_oversize: bool = False
    held: list[Item] = field(default_factory=list)
    """Items of an unfinished batch."""
    weight: tuple[float, ...] = ()
    """Numbers whose exact sum is the weight held (see `exact_sum`)."""
    open: bool = True
    out: dict[str, Item] = field(default_factory=dict)
    """What it delivered that is neither confirmed nor returned, by token."""

    @property
    def waits(self) -> bool:
        """Return whether it has not ended."""
        return self.open

    def pick(self, items: deque[Item]) -> bool:
        """Take what belongs to it from the head of `items`; return whether it is complete."""
        if self.target is None:
            self._pick_what_is_there(items)
            return bool(self.held)
        while items:
            if not self._fits(items[0].weight, self.target):
                if self.allow_oversize and not self.held:
                    self.held.append(items.popleft())
                return True
            self.held.append(items.popleft())
            self.weight = exact_sum(self.weight, self.held[-1].weight)
            if math.fsum(self.weight) >= self.target:
                return True
        return False

    def _pick_what_is_there(self, items: deque[Item]) -> None:
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
    """A waiting put or reservation of room. Callbacks as in Take."""

    client: Client
    key: Key
    nbytes: int
    on_room: Callable[["Put"], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    open: bool = True
    admitted: bool = False
    """It has room, and its payload is still to come."""

    @property
    def waits(self) -> bool:
        """Return whether it waits for room."""
        return self.open and not self.admitted


class KeyQueue:
    """The state of one key."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.takes: deque[Take] = deque()
        self.puts: deque[Put] = deque()
        self.filling: set[Client] = set()
        """Who has room for an item that is still to come. Its next put waits for that one: a process's puts keep their order."""
        self.pumping = False
        """Whether puts and takes are being moved: what a callback changes meanwhile is seen by the loop that called it."""
        self.closed = False
        self.error: Exception | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether it says no more than a new queue would."""
        return not (self.items or self.takes or self.puts or self.filling or self.pumping or self.closed)

    def insert(self, items: Iterable[Item]) -> None:
        """Put returned items back where they stood: before all that were accepted later."""
        for item in sorted(items, key=lambda item: item.number, reverse=True):
            behind = []
            while self.items and self.items[0].number < item.number:
                behind.append(self.items.popleft())
            self.items.appendleft(item)
            self.items.extendleft(reversed(behind))


def exact_sum(parts: tuple[float, ...], number: float) -> tuple[float, ...]:
    """Return few numbers whose exact sum is that of `parts` and `number`, so that ten times 0.1 weigh 1.0.

    `math.fsum` of them is the correctly rounded sum. Source: Shewchuk, "Adaptive precision floating-point arithmetic" (1997).
    """
    rest = []
    for part in parts:
        high = number + part
        large, small = (number, part) if abs(number) >= abs(part) else (part, number)
        if low := small - (high - large):
            rest.append(low)
        number = high
    return (*rest, number)
