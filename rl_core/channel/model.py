"""What the rules of a channel act on: options, items, waiting puts and takes, the state of one key. See `core`."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rl_core.api.errors import ConfigError

Key = Any
"""str or int."""
TakeKind = Literal["get", "lease", "batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelOptions:
    """What `create` fixes for the life of a channel; a second `create` must repeat it."""

    maxsize: int = 0
    """Most stored items per key; 0 = unbounded. Items on lease do not count."""
    delivery: Literal["auto", "lease"] = "auto"
    """How consumers are meant to take: `get` (deleted on receipt) or `lease` (deleted on ack). Both verbs work on both."""
    lease_seconds: float = 120.0
    """A lease that is not renewed for this long is given to another consumer."""
    max_bytes: int | None = None
    """Most payload bytes in the channel, leased ones included; None = unbounded."""
    max_attempts: int = 5
    """Lost consumers after which an item goes to the dead list."""

    def __post_init__(self) -> None:
        if self.maxsize < 0 or (self.max_bytes is not None and self.max_bytes <= 0):
            raise ValueError(f"maxsize must be >= 0 and max_bytes > 0 or None, got {self.maxsize} and {self.max_bytes}")
        if self.delivery not in ("auto", "lease"):
            raise ValueError(f"delivery must be 'auto' or 'lease', got {self.delivery!r}")
        if not self.lease_seconds > 0 or self.max_attempts < 1:
            raise ValueError(
                f"lease_seconds must be > 0 and max_attempts >= 1, got {self.lease_seconds} and {self.max_attempts}"
            )

    def check_equal(self, name: str, existing: "ChannelOptions") -> None:
        """Raise ConfigError when channel `name` exists with other options than these."""
        if self != existing:
            raise ConfigError(
                f"channel {name!r} exists with {existing}, asked for {self}; use equal options or connect"
            )

    def check_fits(self, name: str, sizes: Sequence[int]) -> None:
        """Raise ValueError when items of `sizes` bytes, put together, are more than channel `name` ever holds."""
        if self.max_bytes is not None and sum(sizes) > self.max_bytes:
            raise ValueError(
                f"item has {sum(sizes)} bytes, channel {name!r} holds at most {self.max_bytes}; raise max_bytes"
            )
        if self.maxsize and len(sizes) > self.maxsize:
            raise ValueError(
                f"{len(sizes)} items are put together, a key of channel {name!r} holds {self.maxsize}; put fewer"
            )


class Client(Hashable, Protocol):
    """Who puts and takes: one process. Compared by identity."""

    @property
    def name(self) -> str:
        """Return what errors call it."""


@dataclass(slots=True, eq=False)
class Item:
    """One accepted item. STORED -> OUT -> gone, or back to STORED, or dead."""

    number: int
    key: Key
    payload: Any
    nbytes: int
    weight: float
    stored_at: float
    attempt: int = 1


@dataclass(slots=True, eq=False)
class Delivered:
    """An item in a consumer's hands. `expires` None = a `get` waiting for its receipt, which ends with the client only."""

    token: str
    item: Item
    client: Client
    take: "Take"
    expires: float | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Take:
    """A waiting or finished take. A callback is called at most once, with the take, which it need not refer to itself.

    So no operation is part of a cycle: what has ended is gone at once, with its payload.
    """

    client: Client
    key: Key
    kind: TakeKind
    on_items: Callable[["Take", list[Delivered]], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    target: float = 0.0
    allow_oversize: bool = False
    held: list[Item] = field(default_factory=list)
    """Items of an unfinished batch."""
    weight: tuple[float, ...] = ()
    """Numbers whose exact sum is the weight held (see `exact_sum`)."""
    most: int = 1
    """Items that a `get` or `lease` takes when as many are there and fit in a message; it waits for one only."""
    open: bool = True
    delivered: list[Delivered] = field(default_factory=list)
    """What it was given and has neither confirmed nor returned."""

    @property
    def waits(self) -> bool:
        """Return whether it has not ended."""
        return self.open

    def fits(self, item: Item) -> bool:
        """Return whether the batch with `item` weighs `target` at most."""
        try:
            return math.fsum((*self.weight, item.weight)) <= self.target
        except OverflowError:  # the sum is larger than any float, so larger than the target
            return False

    def hold(self, item: Item) -> None:
        """Add `item` to the batch."""
        self.held.append(item)
        self.weight = exact_sum(self.weight, item.weight)

    @property
    def is_full(self) -> bool:
        """Return whether the batch weighs its target."""
        return math.fsum(self.weight) >= self.target


@dataclass(slots=True, eq=False, weakref_slot=True)
class Put:
    """A waiting put or reservation of room, for one item or for several that are accepted together. Callbacks as in Take."""

    client: Client
    key: Key
    sizes: tuple[int, ...]
    """Bytes of each item."""
    on_room: Callable[["Put"], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    open: bool = True
    admitted: bool = False

    @property
    def waits(self) -> bool:
        """Return whether it waits for room."""
        return self.open and not self.admitted

    @property
    def nbytes(self) -> int:
        """Return the bytes of all items."""
        return sum(self.sizes)


class KeyQueue:
    """The state of one key."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.takes: deque[Take] = deque()
        self.puts: deque[Put] = deque()
        self.reserved = 0
        """Items of admitted puts whose payload is still to come."""
        self.pumping = False
        """Whether puts and takes are being moved: what a callback changes meanwhile is seen by the loop that called it."""
        self.delayed = 0
        self.closed = False
        self.error: Exception | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether it says no more than a new queue would."""
        busy = self.items or self.takes or self.puts or self.reserved or self.delayed or self.pumping
        return not (busy or self.closed)

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
