"""The port between the faces of a channel and where its items are: `client` (a server process) or `local` (this process)."""

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.channel.model import ChannelOptions, Key, TakeKind

DEFAULT_KEY = "default_queue"
DEFAULT_TIMEOUT = 600.0
"""Seconds a put or get waits when no timeout is given (runtime.md 3.6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRequest:
    """One take: `get`, `lease` or `batch` (with target)."""

    key: Key
    kind: TakeKind
    timeout: float
    nowait: bool = False
    target: float = 0.0
    allow_oversize: bool = False
    most: int = 1
    """Items of a `get` or `lease` at most; it waits for the first only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutRequest:
    """One put: `items` are accepted together, in their order, with `weights`; `ack` is acknowledged in the same moment."""

    items: Sequence[Any]
    weights: Sequence[float]
    key: Key
    timeout: float
    nowait: bool = False
    ack: Any = None
    """A Delivery."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An item as it arrived; the backend's `load` makes the object of it."""

    token: str
    attempt: int
    weight: float
    payload: Any


class Backend(Protocol):
    """Implemented by `client.RemoteBackend` and `local.LocalBackend`. Futures may be cancelled: the operation is undone."""

    options: ChannelOptions

    def put(self, request: PutRequest) -> "concurrent.futures.Future[None]":
        """Done when all items are accepted. Raises TypeError or ValueError at once for what cannot travel."""

    def take(self, request: TakeRequest) -> "concurrent.futures.Future[list[Taken]]":
        """Done when the take is complete; cancelled or not fetched, its items go back to the head."""

    def load(self, taken: Taken) -> Any:
        """Return the item of `taken`."""

    def confirm(self, tokens: list[str]) -> None:
        """Tell that items of `get` and `batch` have been received; they are deleted."""

    def give_back(self, taken: list[Taken], *, lost: bool = False, loaded: bool = False) -> None:
        """Return items nobody got; `lost` counts an attempt. The memory of `loaded` ones goes back with their arrays."""

    def watch(self, delivery: Any) -> None:
        """Keep the lease of `delivery` (it has `token`) while the object lives."""

    def control(self, verb: str, *args: Any) -> "concurrent.futures.Future[Any]":
        """ack(token), nack(token, delay), extend(token, seconds), depth(key), full(key), stats(), register(), done(),
        close(key, error), dead(key) -> [Taken]."""
