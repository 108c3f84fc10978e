"""The interface between a channel's public class and the place of its items: `client` (a server process) or `local` (this process)."""

import concurrent.futures
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.channel.model import Delivery
from rl_core.messages.channel import ChannelOptions, Key
from rl_core.transports.shared_memory import LentMemory

DEFAULT_KEY = "default_queue"
DEFAULT_TIMEOUT = 600.0
"""Seconds a put or get waits when no timeout is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutRequest:
    """The arguments of one put."""

    item: Any
    weight: float
    key: Key
    timeout: float
    nowait: bool = False
    lent: Sequence[LentMemory] = ()
    """Memory from `Backend.allocate`. Large arrays of the item that lie in it are not copied, and must not be changed after the put."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRequest:
    """The arguments of one take: of the oldest items, or of a batch by weight."""

    key: Key
    timeout: float
    nowait: bool = False
    target: float | None = None
    """Weight of the batch. None takes the items that are there, at least one."""
    most: int = 1
    """Largest number of items, without a target."""
    allow_oversize: bool = False


class Backend(Protocol):
    """Where the items of a channel are. Implemented by `client.RemoteBackend` and `local.LocalBackend`.

    Cancelling a returned future undoes the operation.
    """

    options: ChannelOptions

    def put(self, request: PutRequest) -> "concurrent.futures.Future[None]":
        """Store an item; the future completes when it is accepted.

        Raises at once TypeError for an item that cannot be serialized and ValueError for one that is too large for the channel.
        """

    def allocate(self, nbytes: int) -> "concurrent.futures.Future[LentMemory | None]":
        """Allocate shared memory for arrays that will be put; see `Channel.allocate_async`."""

    def take(self, request: TakeRequest) -> "concurrent.futures.Future[list[Delivery]]":
        """Take items; the future completes with them.

        If it is cancelled or its result is not read, the items return to the head of the queue.
        """

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager. While its block runs, this process reports that it waits for `what` at this channel: "items" or "room"."""

    def load(self, delivery: Delivery) -> Any:
        """Return the item of `delivery`, decoded if it came from a server."""

    def confirm(self, tokens: list[str]) -> None:
        """Report that the deliveries with these tokens were received, so that their items are deleted."""

    def requeue(self, deliveries: list[Delivery], *, loaded: bool = False) -> None:
        """Return items to the head of the queue because no user received them.

        With `loaded`, their memory is freed when their arrays are deleted.
        """

    def control(self, verb: str, *args: Any) -> "concurrent.futures.Future[Any]":
        """Start one of the remaining operations, named `verb`; the future completes with its result.

        - `depth(key)`: number of stored items.
        - `full(key)`: whether a put would wait.
        - `stats()`: ChannelStats.
        - `move(moves)`: see `Channel.move`.
        - `register()`, `done()`: add a producer, mark one as done.
        - `close(key, error)`: see `Channel.close`.
        """
