"""The records between a channel's users and its server, and the calls that carry them.

user -> server   create(name, ChannelOptions) -> ChannelOptions       connect(name, timeout) -> ChannelOptions
user -> server   put(channel, key, weight, parts, timeout, nowait)
user -> server   reserve(channel, key, sizes of the parts, timeout, nowait, which of them need memory) -> Room, then
                 hand_over(ticket, weight, parts) or abort(ticket)
user -> server   allocate(channel, nbytes) -> SegmentPart | None
user -> server   take(channel, key, timeout, nowait, target, most, allow_oversize, receipts) -> [[token, parts]]
user -> server   confirm(receipts), requeue(channel, tokens)
user -> server   move(channel, [(source key, target key | None)])
user -> server   depth(channel, key), full(channel, key), stats(channel) -> ChannelStats, server_stats() -> ServerStats
user -> server   register(channel, registration), done(channel, registration), close(channel, key, PackedError | None)

`target` is the weight of a batch; without it a take gets up to `most` items. `receipts` are the tokens of received items by channel; a take
also confirms those of earlier takes.
`allocate` lends the user shared memory. Arrays that it writes there are put without a copy: `hand_over` has their positions as SegmentParts,
and `reserve` says that they need no memory.
"""

from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.messages.registry import record

Key = Any
"""What items are queued under: str, int or a tuple of these."""
WORKER_MESSAGES = "worker-messages"
"""Channel of the messages that workers send each other by name. Its keys begin with the names of sender and receiver, `group:rank`."""


@record
class ChannelOptions:
    """Options of a channel, fixed when it is created."""

    maxsize: int = 0
    """Most stored items per key; 0 = unbounded. Delivered items that are not confirmed yet do not count."""
    max_bytes: int | None = None
    """Most payload bytes in the channel, with those of delivered items that are not confirmed yet; None = unbounded."""

    def __post_init__(self) -> None:
        if self.maxsize < 0 or (self.max_bytes is not None and self.max_bytes <= 0):
            raise ValueError(f"maxsize must be >= 0 and max_bytes > 0 or None, got {self.maxsize} and {self.max_bytes}")

    @property
    def limits(self) -> str:
        """Return the options that are set, for error messages."""
        options = {"maxsize": self.maxsize or None, "max_bytes": self.max_bytes}
        return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None) or "no limits"

    def check_equal(self, name: str, existing: "ChannelOptions") -> None:
        """Raise ConfigError when channel `name` exists with other options than these."""
        if self != existing:
            raise ConfigError(
                f"channel {name!r} exists with {existing}, asked for {self}; use equal options or connect"
            )

    def check_fits(self, name: str, nbytes: int) -> None:
        """Raise ValueError when an item of `nbytes` is larger than all of channel `name`."""
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise ValueError(
                f"item has {nbytes} bytes, channel {name!r} holds at most {self.max_bytes}; raise max_bytes"
            )


@record
class SegmentPart:
    """A range of bytes in a segment of the server's shared memory: a part of a payload, or memory that is lent for writing one."""

    segment: str
    generation: int
    """Number of times that the segment was lent. A release with a smaller number is ignored: the segment has another holder by then."""
    nbytes: int
    offset: int = 0
    """Bytes of the segment before the part."""


@record
class Room:
    """Permission to send an item, with shared memory for its large parts where there is some."""

    ticket: int
    """Number to pass to `hand_over` or `abort`."""
    segments: tuple[SegmentPart | None, ...]
    """By part: where to write it; None = send it with the message."""


@record
class KeyStats:
    """State of one key that has items or waiting takes."""

    key: Key
    depth: int
    bytes: int
    oldest_age_seconds: float
    waiters: int
    """Takes waiting."""


@record
class ChannelStats:
    """State of one channel at one moment. Payloads are not included."""

    name: str
    queues: tuple[KeyStats, ...]
    """The keys in use."""
    bytes: int
    """Payload bytes held, with those on their way to consumers."""
    producers: tuple[str, ...]
    """Processes with registered producers that are alive and not done."""
    closed: bool
    put_wait_seconds: float
    """Summed over all puts."""
    puts: int
    gets: int
    redelivered: int
    """Items that came back because their consumer was lost or gave up."""

    @property
    def keys(self) -> dict[Key, KeyStats]:
        """Return the stats of the keys in use."""
        return {queue.key: queue for queue in self.queues}

    @property
    def depth(self) -> int:
        """Return the stored items of all keys."""
        return sum(queue.depth for queue in self.queues)

    @property
    def oldest_age_seconds(self) -> float:
        """Return the age of the oldest stored item; 0 when there is none."""
        return max((queue.oldest_age_seconds for queue in self.queues), default=0.0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the whole channel by name."""
        return {
            "channel/depth": self.depth,
            "channel/bytes": self.bytes,
            "channel/oldest_age_seconds": self.oldest_age_seconds,
            "channel/waiters": sum(queue.waiters for queue in self.queues),
            "channel/put_wait_seconds": self.put_wait_seconds,
            "channel/puts_total": self.puts,
            "channel/gets_total": self.gets,
            "channel/redelivered_total": self.redelivered,
        }

    def __str__(self) -> str:
        keys = ", ".join(
            f"{queue.key!r}: {queue.depth} items, {queue.bytes} bytes, oldest {queue.oldest_age_seconds:.1f} s"
            for queue in self.queues
        )
        return f"Channel({self.name!r}, {'closed' if self.closed else 'open'}, {{{keys}}})"


@record
class ServerStats:
    """State of all channels of a server, and counters of its transport and shared memory."""

    channels: dict[str, ChannelStats]
    transport: dict[str, int]
    memory: dict[str, int]
