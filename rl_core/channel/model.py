"""What the rules of a channel act on: options, items, waiting puts and takes, the state of one key. See `core`."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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


@dataclass(slots=True, eq=False)
class Take:
    """A waiting or finished take: the callbacks are called at most once."""

    client: Client
    key: Key
    kind: TakeKind
    on_items: Callable[[list[Delivered]], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    target: float = 0.0
    allow_oversize: bool = False
    held: list[Item] = field(default_factory=list)
    """Items of an unfinished batch."""
    most: int = 1
    """Items that a `get` or `lease` takes when as many are there and fit in a message; it waits for one only."""
    open: bool = True
    delivered: list[Delivered] = field(default_factory=list)
    """What it was given and has neither confirmed nor returned."""

    @property
    def weight(self) -> float:
        """Return the weight held so far."""
        return sum(item.weight for item in self.held)


@dataclass(slots=True, eq=False)
class Put:
    """A waiting put or reservation of room, for one item or for several that are accepted together."""

    client: Client
    key: Key
    sizes: tuple[int, ...]
    """Bytes of each item."""
    on_room: Callable[[], None]
    on_error: Callable[[Exception], None]
    deadline: float
    since: float
    open: bool = True
    admitted: bool = False

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

    def insert(self, items: Iterable[Item]) -> None:
        """Put returned items back where they stood: before all that were accepted later."""
        for item in sorted(items, key=lambda item: item.number, reverse=True):
            behind = []
            while self.items and self.items[0].number < item.number:
                behind.append(self.items.popleft())
            self.items.appendleft(item)
            self.items.extendleft(reversed(behind))
