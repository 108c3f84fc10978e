"""Channel: keyed FIFO queues between processes, with deadlines, leases and weighted batches (runtime.md 5).

    prompts = Channel.create("prompts", delivery="lease")
    prompts.put({"prompt": "2+2="}, weight=3)
    with prompts.lease() as delivery:          # ack at the end, nack on an exception
        answer(delivery.item)

The same face over a channel server (`client.configure` names it) or inside one process (`local=True`). Sync methods raise
RuntimeError on an event-loop thread; their `_async` twins are coroutines. Handles travel in RPC calls.
"""

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError
from rl_core.channel import local as local_channels
from rl_core.channel.backend import DEFAULT_KEY, DEFAULT_TIMEOUT, Backend, PutRequest, Taken, TakeRequest
from rl_core.channel.delivery import AsyncHandle, Delivery, let_go, wait_async, wait_sync
from rl_core.channel.model import ChannelOptions, Key
from rl_core.channel.stats import ChannelStats
from rl_core.transports.frames import register_record
from rl_core.transports.rpc_wire import refuse_on_event_loop

if TYPE_CHECKING:
    from rl_core.channel.client import ChannelClient

Future = concurrent.futures.Future


class Channel:
    """A handle of one channel; make it with `create` or `connect`, or receive it in a call."""

    def __init__(self, name: str, backend: Backend, *, local: bool) -> None:
        self.name = name
        self._backend = backend
        self._local = local

    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        delivery: str = "auto",
        lease_seconds: float = 120.0,
        max_bytes: int | None = None,
        max_attempts: int = 5,
        client: "ChannelClient | None" = None,
    ) -> "Channel":
        """Return the channel `name`, made with these options, or connected to if it exists with the same.

        `local`: inside this process, by reference, for as long as a handle of it lives. Raises ValueError for bad options and
        ConfigError when the existing channel differs or a channel server per node would be needed.
        """
        if distributed or node_rank != 0:
            raise ConfigError(
                f"channel {name!r}: distributed={distributed}, node_rank={node_rank} need a channel server per node, "
                "a job has one on node 0; use distributed=False and node_rank=0"
            )
        options = ChannelOptions(
            maxsize=maxsize, delivery=delivery, lease_seconds=lease_seconds, max_bytes=max_bytes, max_attempts=max_attempts  # type: ignore[arg-type]
        )  # fmt: skip
        if local:
            return cls(name, local_channels.create(name, options), local=True)
        return cls(name, wait_sync(lambda: _client(client).create(name, options), "Channel.create"), local=False)

    @classmethod
    async def create_async(cls, name: str, *, client: "ChannelClient | None" = None, **options: Any) -> "Channel":
        """Return `create(name, ...)` from a coroutine; options are those of ChannelOptions."""
        backend = await wait_async(_client(client).create(name, ChannelOptions(**options)))
        return cls(name, backend, local=False)

    @classmethod
    def connect(
        cls, name: str, worker: Any = None, timeout: float | None = None, *, client: "ChannelClient | None" = None
    ) -> "Channel":
        """Return the channel `name`: a local one of this process, else the server's, waiting until somebody creates it.

        `worker` may bring its own `channel_client`. Raises DeadlineExceeded after `timeout` (None = 600 s).
        """
        here = local_channels.find(name)
        if here is not None and client is None:
            return cls(name, here, local=True)
        client = client or getattr(worker, "channel_client", None)
        backend = wait_sync(lambda: _client(client).connect(name, _seconds(timeout)), "Channel.connect")
        return cls(name, backend, local=False)

    @classmethod
    async def connect_async(
        cls, name: str, timeout: float | None = None, *, client: "ChannelClient | None" = None
    ) -> "Channel":
        """Return `connect(name)` from a coroutine."""
        here = local_channels.find(name)
        if here is not None and client is None:
            return cls(name, here, local=True)
        return cls(name, await wait_async(_client(client).connect(name, _seconds(timeout))), local=False)

    # --- putting ---

    def put(
        self,
        item: Any,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
        *,
        ack: Delivery | None = None,
    ) -> "AsyncHandle[None] | None":
        """Store `item`; returns when it is accepted, or with `async_op` a handle at once (leave its tensors unwritten till done).

        `ack` is acknowledged in the moment of acceptance: what was made of a leased item takes its place in one message.
        Waits while the key holds maxsize items or the channel max_bytes. Raises DeadlineExceeded, ChannelClosed, ValueError
        (weight not finite or negative; item larger than max_bytes; `ack` of another server), TypeError (an item that cannot travel).
        """
        if async_op:
            return AsyncHandle(self._put([item], [weight], key, timeout, ack=ack), lambda none: none, let_go)
        wait_sync(lambda: self._put([item], [weight], key, timeout, ack=ack), "Channel.put")
        return None

    async def put_async(
        self,
        item: Any,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        timeout: float | None = None,
        *,
        ack: Delivery | None = None,
    ) -> None:
        """Store `item`; a cancelled put is undone unless it was accepted."""
        await wait_async(self._put([item], [weight], key, timeout, ack=ack))

    def put_nowait(self, item: Any, weight: float = 0, key: Key = DEFAULT_KEY) -> None:
        """Store `item` if there is room; ChannelFull otherwise."""
        wait_sync(lambda: self._put([item], [weight], key, None, nowait=True), "Channel.put_nowait")

    def put_many(
        self,
        items: Sequence[Any],
        weights: Sequence[float] | None = None,
        key: Key = DEFAULT_KEY,
        timeout: float | None = None,
    ) -> None:
        """Store `items` together, in their order, in one message: all are accepted or none. Raises as `put`.

        ValueError also for no items, for other than one weight each, and for more of them than maxsize.
        """
        given = [0.0] * len(items) if weights is None else weights
        wait_sync(lambda: self._put(items, given, key, timeout), "Channel.put_many")

    async def put_many_async(
        self,
        items: Sequence[Any],
        weights: Sequence[float] | None = None,
        key: Key = DEFAULT_KEY,
        timeout: float | None = None,
    ) -> None:
        """Return `put_many(...)` from a coroutine; cancelled, none is stored unless all were accepted."""
        given = [0.0] * len(items) if weights is None else weights
        await wait_async(self._put(items, given, key, timeout))

    def _put(
        self,
        items: Sequence[Any],
        weights: Sequence[float],
        key: Key,
        timeout: float | None,
        *,
        nowait: bool = False,
        ack: Delivery | None = None,
    ) -> "Future[None]":
        if not items or len(items) != len(weights):
            raise ValueError(f"a put must have items and one weight each, got {len(items)} and {len(weights)}")
        for weight in weights:
            _check_weight("weight", weight)
        request = PutRequest(
            items=items, weights=[*map(float, weights)], key=key, timeout=_seconds(timeout), nowait=nowait, ack=ack
        )
        return self._backend.put(request)

    # --- taking ---

    def get(self, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return the oldest item; waiters are served in order. With `async_op` an AsyncHandle.

        Raises DeadlineExceeded (tells depth and live producers), ChannelClosed or ProducerLost when closed and drained.
        """
        return self._take(
            TakeRequest(key=key, kind="get", timeout=_seconds(timeout)), async_op, "Channel.get", self._one
        )

    async def get_async(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> Any:
        """Return the oldest item; a cancelled get returns it to the head."""
        return await self._take_async(TakeRequest(key=key, kind="get", timeout=_seconds(timeout)), self._one)

    def get_nowait(self, key: Key = DEFAULT_KEY) -> Any:
        """Return the oldest item; ChannelEmpty when there is none, ChannelClosed when closed and drained."""
        return self._take(
            TakeRequest(key=key, kind="get", timeout=DEFAULT_TIMEOUT, nowait=True),
            False,
            "Channel.get_nowait",
            self._one,
        )

    def get_batch(
        self,
        target_weight: float,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
        allow_oversize: bool = False,
    ) -> Any:
        """Return the oldest items whose weights sum to at most `target_weight`, waiting until the sum or the next item stops it.

        A head heavier than the target gives [] at once (with `allow_oversize` that one item). On close: what it holds. On
        deadline the held items go back in order.
        """
        return self._take(
            self._batch(target_weight, key, timeout, allow_oversize), async_op, "Channel.get_batch", self._many
        )

    async def get_batch_async(
        self, target_weight: float, key: Key = DEFAULT_KEY, timeout: float | None = None, allow_oversize: bool = False
    ) -> list[Any]:
        """Return `get_batch(...)` from a coroutine; cancelled, the held items go back in order."""
        items: list[Any] = await self._take_async(self._batch(target_weight, key, timeout, allow_oversize), self._many)
        return items

    def lease(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> Delivery:
        """Return the oldest item on lease: it comes back to the head unless it is acknowledged."""
        delivery: Delivery = self._take(
            TakeRequest(key=key, kind="lease", timeout=_seconds(timeout)), False, "Channel.lease", self._leased
        )
        return delivery

    async def lease_async(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> Delivery:
        """Return `lease(...)` from a coroutine; a cancelled lease returns its item to the head."""
        delivery: Delivery = await self._take_async(
            TakeRequest(key=key, kind="lease", timeout=_seconds(timeout)), self._leased
        )
        return delivery

    def lease_many(self, most: int, key: Key = DEFAULT_KEY, timeout: float | None = None) -> list[Delivery]:
        """Return the oldest items on lease, 1 to `most`, as many as are there (of 32 MiB at most); waits for the first only."""
        deliveries: list[Delivery] = self._take(
            self._leases(most, key, timeout), False, "Channel.lease_many", self._leased_many
        )
        return deliveries

    async def lease_many_async(self, most: int, key: Key = DEFAULT_KEY, timeout: float | None = None) -> list[Delivery]:
        """Return `lease_many(...)` from a coroutine; cancelled, the items go back to the head."""
        deliveries: list[Delivery] = await self._take_async(self._leases(most, key, timeout), self._leased_many)
        return deliveries

    def _leases(self, most: int, key: Key, timeout: float | None) -> TakeRequest:
        if most < 1:
            raise ValueError(f"most must be at least 1 item, got {most}")
        return TakeRequest(key=key, kind="lease", timeout=_seconds(timeout), most=most)

    def _batch(self, target: float, key: Key, timeout: float | None, allow_oversize: bool) -> TakeRequest:
        _check_weight("target_weight", target)
        return TakeRequest(
            key=key, kind="batch", timeout=_seconds(timeout), target=float(target), allow_oversize=allow_oversize
        )

    def _take(self, request: TakeRequest, async_op: bool, what: str, receive: Callable[[list[Taken]], Any]) -> Any:
        if async_op:
            return AsyncHandle(self._backend.take(request), receive, self._give_up)
        refuse_on_event_loop(what)
        future = self._backend.take(request)
        try:
            taken = future.result()
        except KeyboardInterrupt:  # nobody is there to take it
            self._give_up(future)
            raise
        return receive(taken)

    async def _take_async(self, request: TakeRequest, receive: Callable[[list[Taken]], Any]) -> Any:
        future = self._backend.take(request)
        try:
            taken = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._give_up(future)
            raise
        return receive(taken)

    def _give_up(self, future: "Future[list[Taken]]") -> None:
        if not future.cancel() and future.exception() is None:
            self._backend.give_back(future.result())

    def _one(self, taken: list[Taken]) -> Any:
        return self._many(taken)[0]

    def _many(self, taken: list[Taken]) -> list[Any]:
        items = self._load(taken)
        self._backend.confirm([entry.token for entry in taken])
        return items

    def _leased(self, taken: list[Taken]) -> Delivery:
        return self._leased_many(taken)[0]

    def _leased_many(self, taken: list[Taken]) -> list[Delivery]:
        items = self._load(taken)
        deliveries = [Delivery(self._backend, entry, item) for entry, item in zip(taken, items, strict=True)]
        for delivery in deliveries:
            self._backend.watch(delivery)
        return deliveries

    def _load(self, taken: list[Taken]) -> list[Any]:
        items: list[Any] = []
        try:
            for entry in taken:
                items.append(self._backend.load(entry))
        except Exception:  # what this process cannot decode counts as a lost attempt, so that it ends on the dead list
            bad = len(items)
            self._backend.give_back([taken[bad]], lost=True, loaded=True)
            self._backend.give_back(taken[:bad], loaded=True)
            self._backend.give_back(taken[bad + 1 :])
            raise
        return items

    # --- looking and ending ---

    def qsize(self, key: Key = DEFAULT_KEY) -> int:
        """Return the stored items of `key`, without leased ones; 0 for an unknown key."""
        depth: int = self._control("depth", key)
        return depth

    def empty(self, key: Key = DEFAULT_KEY) -> bool:
        """Return whether `key` has no stored items."""
        return self.qsize(key) == 0

    def full(self, key: Key = DEFAULT_KEY) -> bool:
        """Return whether a put to `key` would wait."""
        full: bool = self._control("full", key)
        return full

    def stats(self) -> ChannelStats:
        """Return depth, bytes and age per key, and the counters; never payloads."""
        return ChannelStats.from_dict(self._control("stats"))

    async def stats_async(self) -> ChannelStats:
        """Return `stats()` from a coroutine."""
        return ChannelStats.from_dict(await wait_async(self._backend.control("stats")))

    def dead_items(self, key: Key = DEFAULT_KEY) -> list[Delivery]:
        """Return the items that lost `max_attempts` consumers; `ack` removes one, `nack` gives it new attempts."""
        return [Delivery(self._backend, entry, self._backend.load(entry)) for entry in self._control("dead", key)]

    async def dead_items_async(self, key: Key = DEFAULT_KEY) -> list[Delivery]:
        """Return `dead_items(key)` from a coroutine."""
        return [
            Delivery(self._backend, entry, self._backend.load(entry))
            for entry in await wait_async(self._backend.control("dead", key))
        ]

    def register_producer(self) -> None:
        """Count one producer; the channel closes when as many are done as were registered. Fixed sets only.

        A process that ends with producers of its own has lost them all.
        """
        self._control("register")

    def done_producing(self) -> None:
        """Tell that one producer of this process will put no more."""
        self._control("done")

    def close(self, key: Key | None = None, error: BaseException | None = None) -> None:
        """Refuse later puts; stored items are still delivered, then gets raise `error` or ChannelClosed. Idempotent."""
        self._control("close", key, error)

    async def close_async(self, key: Key | None = None, error: BaseException | None = None) -> None:
        """Return `close(...)` from a coroutine."""
        await wait_async(self._backend.control("close", key, error))

    def _control(self, verb: str, *args: Any) -> Any:
        return wait_sync(lambda: self._backend.control(verb, *args), f"Channel.{verb}")

    def __str__(self) -> str:
        return f"Channel({self.name!r}, {'local' if self._local else 'remote'})" if _on_loop() else str(self.stats())

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    # --- travelling ---

    def wire_fields(self) -> dict[str, Any]:
        """Return what a handle is on the wire. Raises TypeError for a local channel."""
        if self._local:
            raise TypeError(
                f"channel {self.name!r} is local to this process and cannot travel; create it with local=False"
            )
        return {"name": self.name, "options": self._backend.options}

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> "Channel":
        """Return the handle, bound to this process's channel client."""
        return cls(fields["name"], _client(None).backend(fields["name"], fields["options"]), local=False)


register_record(ChannelOptions)
register_record(Channel)


def _client(client: "ChannelClient | None") -> "ChannelClient":
    if client is not None:
        return client
    from rl_core.channel.client import current

    return current()


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout must be None (= {DEFAULT_TIMEOUT:g} s) or finite and >= 0 seconds, got {timeout}")
    return timeout


def _check_weight(what: str, weight: float) -> None:
    if not 0 <= weight < math.inf:
        raise ValueError(f"{what} must be finite and >= 0, got {weight}")


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
