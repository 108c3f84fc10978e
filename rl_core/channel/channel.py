"""Channel: keyed FIFO queues between processes, with deadlines and batches by weight.

    trajectories = Channel.create("trajectories", maxsize=64)
    trajectories.put(record, weight=3)
    records = trajectories.get_batch(target_weight=8)

The same class works with a channel server (see `client.configure`) and inside one process (`local=True`). Synchronous methods raise
RuntimeError on an event-loop thread; their `_async` variants are coroutines. Handles can be passed in RPC calls.
"""

import asyncio
import concurrent.futures
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.channel import local as local_channels
from rl_core.channel.backend import DEFAULT_KEY, DEFAULT_TIMEOUT, Backend, PutRequest, TakeRequest
from rl_core.channel.client import ChannelClient, current
from rl_core.channel.handle import AsyncHandle, detach, wait_sync
from rl_core.channel.model import Delivery
from rl_core.messages.channel import ChannelOptions, ChannelStats, Key
from rl_core.messages.registry import register_record
from rl_core.transports.loop_futures import wait_future
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.transports.shared_memory import LentMemory

Future = concurrent.futures.Future


class Channel:
    """A handle of one channel. Get one by `create` or `connect`, or as an argument of an RPC call."""

    def __init__(self, name: str, backend: Backend, *, local: bool) -> None:
        """For `create` and `connect`: the channel `name` in `backend`. `local` says that it is inside this process."""
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
        max_bytes: int | None = None,
        client: ChannelClient | None = None,
    ) -> "Channel":
        """Return the channel `name`. It is created if it does not exist; an existing one must have the same options.

        - `maxsize`: largest number of stored items per key; 0 means no limit.
        - `max_bytes`: largest number of payload bytes of the whole channel; None means no limit.
        - `distributed`, `node_rank`: accepted for compatibility. A job has one channel server; values that ask for one per node raise
          ConfigError.
        - `local`: the channel is inside this process, passes items by reference, and exists as long as a handle of it.
        - `client`: connection to the channel server; None means the one of this process.

        Raises ValueError for invalid options, and ConfigError if the existing channel has other options.
        """
        if distributed or node_rank != 0:
            raise ConfigError(
                f"channel {name!r}: distributed={distributed}, node_rank={node_rank} need a channel server per node, "
                "a job has one on node 0; use distributed=False and node_rank=0"
            )
        options = ChannelOptions(maxsize=maxsize, max_bytes=max_bytes)
        if local:
            return cls(name, local_channels.create(name, options), local=True)
        return cls(name, wait_sync(lambda: (client or current()).create(name, options), "Channel.create"), local=False)

    @classmethod
    def connect(
        cls, name: str, worker: Any = None, timeout: float | None = None, *, client: ChannelClient | None = None
    ) -> "Channel":
        """Return the channel `name`: a local one of this process if it exists, otherwise that of the server, once it is created.

        `worker` may be an object with a `channel_client` of its own. `timeout` is in seconds (None: 600). Raises DeadlineExceeded when the
        channel is not created in time.
        """
        local_backend = local_channels.find(name)
        if local_backend is not None and client is None:
            return cls(name, local_backend, local=True)
        client = client or getattr(worker, "channel_client", None)
        backend = wait_sync(lambda: (client or current()).connect(name, _seconds(timeout)), "Channel.connect")
        return cls(name, backend, local=False)

    # --- putting ---

    def put(
        self, item: Any, weight: float = 0, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None
    ) -> "AsyncHandle[None] | None":
        """Store `item` and return when it is accepted.

        With `async_op`, return a handle at once; tensors of `item` must not be changed until it is done.

        Waits while the key has `maxsize` items or the channel `max_bytes`. `timeout` is in seconds (None: 600). `weight` counts for
        `get_batch` and has any unit that the consumers share, for example samples or tokens. Raises DeadlineExceeded; ChannelClosed;
        ValueError for a weight that is negative or not finite and for an item larger than `max_bytes`; TypeError for an item that cannot be
        serialized.
        """
        if async_op:
            return AsyncHandle(self._put(item, weight, key, timeout), lambda none: none, detach)
        with self._backend.waiting("room"):
            wait_sync(lambda: self._put(item, weight, key, timeout), "Channel.put")
        return None

    async def put_async(
        self,
        item: Any,
        weight: float = 0,
        key: Key = DEFAULT_KEY,
        timeout: float | None = None,
        *,
        lent: Sequence[LentMemory] = (),
    ) -> None:
        """Put `item` into the channel, and return when the channel has accepted it.

        The arguments are those of `put` without `async_op`, and `lent`, which is memory that `allocate_async` returned. If an array of `item`
        has at least 256 KiB, the arrays that lie in `lent` are not copied. The consumer reads them in place, so they must not be changed
        after this call. Smaller items are sent in a message. The memory may be released once the call has returned: the server keeps it until
        the item is no longer used. A cancelled call puts either the whole item or nothing. Raises what `put` raises, and InfrastructureError
        if the item lies in memory that is not lent to this process any more.
        """
        await wait_future(self._put(item, weight, key, timeout, lent=lent))

    async def allocate_async(self, nbytes: int) -> LentMemory | None:
        """Return `nbytes` bytes of shared memory, into which arrays can be written that `put_async` then stores without a copy.

        The contents are arbitrary. The bytes count for `max_bytes` only when they are put. The caller must release the memory, also after it
        was put. Returns None for a local channel, if the channel server is on another host, and if shared memory is full. Raises ConfigError
        if this process may not put into the channel.
        """
        allocated = self._backend.allocate(nbytes)
        try:
            return await wait_future(allocated)
        except asyncio.CancelledError:
            # If it cannot be cancelled any more, the reply has come or is being read.
            if not allocated.cancel() and allocated.exception() is None and (lent := allocated.result()) is not None:
                lent.release()
            raise

    def put_nowait(self, item: Any, weight: float = 0, key: Key = DEFAULT_KEY) -> None:
        """Store `item` if there is room; otherwise raise ChannelFull."""
        wait_sync(lambda: self._put(item, weight, key, None, nowait=True), "Channel.put_nowait")

    def _put(
        self,
        item: Any,
        weight: float,
        key: Key,
        timeout: float | None,
        *,
        nowait: bool = False,
        lent: Sequence[LentMemory] = (),
    ) -> "Future[None]":
        _check_weight("weight", weight)
        return self._backend.put(
            PutRequest(item=item, weight=float(weight), key=key, timeout=_seconds(timeout), nowait=nowait, lent=lent)
        )

    # --- taking ---

    def get(self, key: Key = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Remove and return the oldest item. With `async_op`, return an AsyncHandle at once.

        Waiting callers are served in order. `timeout` is in seconds (None: 600). Raises DeadlineExceeded, whose message has the depth and
        the producers that are not done, and ChannelClosed or ProducerLost if the channel is closed and empty.
        """
        return self._take(TakeRequest(key=key, timeout=_seconds(timeout)), async_op, "Channel.get", self._load_one)

    async def get_async(self, key: Key = DEFAULT_KEY, timeout: float | None = None) -> Any:
        """Return the oldest item. If the call is cancelled, the item returns to the head of the queue."""
        return await self._take_async(TakeRequest(key=key, timeout=_seconds(timeout)), self._load_one)

    async def get_some_async(self, most: int, key: Key = DEFAULT_KEY, timeout: float | None = None) -> list[Any]:
        """Remove and return the oldest items: at least one and at most `most`. Waits for the first only.

        Fewer than are stored may be returned when they are large (1 MiB together). If the call is cancelled, the items return to the queue
        in order.
        """
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        items: list[Any] = await self._take_async(
            TakeRequest(key=key, timeout=_seconds(timeout), most=most), self._load_many
        )
        return items

    def get_nowait(self, key: Key = DEFAULT_KEY) -> Any:
        """Return the oldest item. Raises ChannelEmpty if there is none, ChannelClosed if the channel is closed and empty."""
        request = TakeRequest(key=key, timeout=DEFAULT_TIMEOUT, nowait=True)
        return self._take(request, False, "Channel.get_nowait", self._load_one)

    def get_batch(
        self,
        target_weight: float,
        key: Key = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
        allow_oversize: bool = False,
    ) -> Any:
        """Remove and return the oldest items, in order, as long as their weights sum to at most `target_weight`.

        Waits until the sum reaches the target or the next item would exceed it. If the first item alone is heavier than the target, returns
        [] at once and leaves it, or with `allow_oversize` returns that item alone. When the channel is closed, returns the items collected
        so far. Raises DeadlineExceeded after `timeout` seconds (None: 600); the collected items then return to the queue in order.
        """
        request = _batch(target_weight, key, timeout, allow_oversize)
        return self._take(request, async_op, "Channel.get_batch", self._load_many)

    async def get_batch_async(
        self, target_weight: float, key: Key = DEFAULT_KEY, timeout: float | None = None, allow_oversize: bool = False
    ) -> list[Any]:
        """As `get_batch`, as a coroutine. If the call is cancelled, the collected items return to the queue in order."""
        items: list[Any] = await self._take_async(_batch(target_weight, key, timeout, allow_oversize), self._load_many)
        return items

    def _take(self, request: TakeRequest, async_op: bool, what: str, receive: Callable[[list[Delivery]], Any]) -> Any:
        if async_op:
            return AsyncHandle(self._backend.take(request), receive, self._give_up)
        refuse_on_event_loop(what)
        future = self._backend.take(request)
        try:
            with self._backend.waiting("items"):
                deliveries = future.result()
        except KeyboardInterrupt:  # no caller is left to take the items
            self._give_up(future)
            raise
        return receive(deliveries)

    async def _take_async(self, request: TakeRequest, receive: Callable[[list[Delivery]], Any]) -> Any:
        future = self._backend.take(request)
        try:
            deliveries = await wait_future(future)
        except asyncio.CancelledError:
            self._give_up(future)
            raise
        return receive(deliveries)

    def _give_up(self, future: "Future[list[Delivery]]") -> None:
        if not future.cancel() and future.exception() is None:
            self._backend.requeue(future.result())

    def _load_one(self, deliveries: list[Delivery]) -> Any:
        return self._load_many(deliveries)[0]

    def _load_many(self, deliveries: list[Delivery]) -> list[Any]:
        items: list[Any] = []
        try:
            for delivery in deliveries:
                items.append(self._backend.load(delivery))
        except Exception:
            # An item that cannot be decoded is deleted. At the head of the queue it would stop every later get.
            index = len(items)
            self._backend.confirm([deliveries[index].token])
            self._backend.requeue(deliveries[:index], loaded=True)
            self._backend.requeue(deliveries[index + 1 :])
            raise
        self._backend.confirm([delivery.token for delivery in deliveries])
        return items

    def move(self, moves: Sequence[tuple[Key, Key | None]]) -> "Future[None]":
        """Move the stored items of each source key to a target key, or delete them where the target is None.

        `moves` is a list of (source, target). Items are appended to the target in their order. Returns a future that completes when the
        server has done so. A source key without items is ignored, so the call may be repeated. In a job only the runner may call it.
        """
        return self._backend.control("move", list(moves))

    # --- looking and ending ---

    def qsize(self, key: Key = DEFAULT_KEY) -> int:
        """Return the number of stored items of `key`; 0 for an unknown key."""
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
        """Return depth, bytes and age per key, and counters. Payloads are not included."""
        stats: ChannelStats = self._control("stats")
        return stats

    def request_stats(self) -> "Future[ChannelStats]":
        """Start `stats` and return a future of it, for callers that must not block."""
        return self._backend.control("stats")

    def register_producer(self) -> None:
        """Register this process as a producer; a process may register several times.

        The channel closes when every registered producer is done. All producers must register before the first one is done. If a process
        ends, those of its producers that are not done count as lost (ProducerLost).
        """
        self._control("register")

    def done_producing(self) -> None:
        """Mark one producer of this process as done."""
        self._control("done")

    def close(self, key: Key | None = None, error: BaseException | None = None) -> None:
        """Refuse later puts to `key`, or to all keys with None.

        Stored items are still delivered. Afterwards gets raise `error`, or ChannelClosed if it is None. May be called again; the first
        error is kept. Raises TypeError for an `error` that is no exception.
        """
        if error is not None and not isinstance(error, BaseException):
            raise TypeError(f"error must be an exception, got {error!r}; pass RuntimeError({error!r})")
        self._control("close", key, error)

    def close_key(self, key: Key) -> "Future[None]":
        """Start to close one key, as `close` does; the future completes when it is closed."""
        return self._backend.control("close", key, None)

    def _control(self, verb: str, *args: Any) -> Any:
        return wait_sync(lambda: self._backend.control(verb, *args), f"Channel.{verb}")

    def __str__(self) -> str:
        return f"Channel({self.name!r}, {'local' if self._local else 'remote'})" if _on_loop() else str(self.stats())

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    # --- travelling ---

    def wire_fields(self) -> dict[str, Any]:
        """Return the fields by which a handle is serialised. Raises TypeError for a local channel."""
        if self._local:
            raise TypeError(
                f"channel {self.name!r} is local to this process and cannot travel; create it with local=False"
            )
        return {"name": self.name, "options": self._backend.options}

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> "Channel":
        """Return the handle for the channel client of this process."""
        return cls(fields["name"], current().backend(fields["name"], fields["options"]), local=False)


register_record(Channel)


def _batch(target: float, key: Key, timeout: float | None, allow_oversize: bool) -> TakeRequest:
    _check_weight("target_weight", target)
    return TakeRequest(key=key, timeout=_seconds(timeout), target=float(target), allow_oversize=allow_oversize)


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not isinstance(timeout, numbers.Real) or not 0 <= timeout < math.inf:
        raise ValueError(f"timeout must be None (= {DEFAULT_TIMEOUT:g} s) or finite and >= 0 seconds, got {timeout!r}")
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
