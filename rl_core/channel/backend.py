"""The port between the faces of a channel and where its items are: `client` (a server process) or `local` (this process)."""

import concurrent.futures
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.channel.model import Delivery
from rl_core.messages.channel import ChannelOptions, Key

DEFAULT_KEY = "default_queue"
DEFAULT_TIMEOUT = 600.0
"""Seconds a put or get waits when no timeout is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutRequest:
    """One put."""

    item: Any
    weight: float
    key: Key
    timeout: float
    nowait: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRequest:
    """One take: of the oldest items, or of a batch."""

    key: Key
    timeout: float
    nowait: bool = False
    target: float | None = None
    """Weight of the batch; None = what is there, one item at least."""
    most: int = 1
    """Items at most, without a target."""
    allow_oversize: bool = False


class Backend(Protocol):
    """Implemented by `client.RemoteBackend` and `local.LocalBackend`. Futures may be cancelled: the operation is undone."""

    options: ChannelOptions

    def put(self, request: PutRequest) -> "concurrent.futures.Future[None]":
        """Done when the item is accepted. Raises TypeError or ValueError at once for what cannot travel or never fits."""

    def take(self, request: TakeRequest) -> "concurrent.futures.Future[list[Delivery]]":
        """Done when the take is complete; cancelled or not fetched, its items go back to the head."""

    def load(self, delivery: Delivery) -> Any:
        """Return the item of `delivery`."""

    def confirm(self, tokens: list[str]) -> None:
        """Report items as received; they are deleted."""

    def requeue(self, deliveries: list[Delivery], *, loaded: bool = False) -> None:
        """Return items to the head that no user received. The memory of `loaded` ones goes back with their arrays."""

    def control(self, verb: str, *args: Any) -> "concurrent.futures.Future[Any]":
        """depth(key), full(key), stats(), move(moves), register(), done(), close(key, error)."""
