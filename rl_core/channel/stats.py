"""ChannelStats: what can be seen of a channel from outside; never payloads."""

from dataclasses import dataclass
from typing import Any

from rl_core.channel.model import Key


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyStats:
    """One key."""

    depth: int
    bytes: int
    oldest_age_seconds: float
    waiters: int
    """Takes waiting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelStats:
    """One channel at one moment."""

    name: str
    keys: dict[Key, KeyStats]
    bytes: int
    """Payload bytes held, with those on lease."""
    leases: int
    dead_items: int
    producers: list[str]
    """Registered producers that are alive and not done."""
    closed: bool
    put_wait_seconds: float
    """Summed over all puts."""
    puts: int
    gets: int
    redelivered: int
    expired: int
    dead: int
    stale_acks: int

    @classmethod
    def from_dict(cls, stats: dict[str, Any]) -> "ChannelStats":
        """Return the stats of `ChannelCore.stats`."""
        keys = {key: KeyStats(**entry) for key, entry in stats["keys"].items()}
        return cls(**{**stats, "keys": keys})

    @property
    def depth(self) -> int:
        """Return the stored items of all keys."""
        return sum(entry.depth for entry in self.keys.values())

    @property
    def oldest_age_seconds(self) -> float:
        """Return the age of the oldest stored item; 0 when there is none."""
        return max((entry.oldest_age_seconds for entry in self.keys.values()), default=0.0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of runtime.md 5 by name, for the whole channel."""
        return {
            "channel/depth": self.depth,
            "channel/bytes": self.bytes,
            "channel/oldest_age_seconds": self.oldest_age_seconds,
            "channel/leases": self.leases,
            "channel/waiters": sum(entry.waiters for entry in self.keys.values()),
            "channel/put_wait_seconds": self.put_wait_seconds,
            "channel/puts_total": self.puts,
            "channel/gets_total": self.gets,
            "channel/redelivered_total": self.redelivered,
            "channel/expired_total": self.expired,
            "channel/dead_total": self.dead,
        }

    def __str__(self) -> str:
        keys = ", ".join(
            f"{key!r}: {entry.depth} items, {entry.bytes} bytes, oldest {entry.oldest_age_seconds:.1f} s"
            for key, entry in self.keys.items()
        )
        return f"Channel({self.name!r}, {'closed' if self.closed else 'open'}, leases {self.leases}, {{{keys}}})"
