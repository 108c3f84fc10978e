"""A process's connection to the channel server; `configure` sets the one that Channel uses.

Receipts confirm items that were received. They are sent with the next take, or on their own after a few milliseconds. `puts` sends items to
the server.
"""

import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.channel import payload
from rl_core.channel.backend import PutRequest, TakeRequest
from rl_core.channel.model import Delivery
from rl_core.channel.puts import MARGIN, PutSender
from rl_core.messages.channel import ChannelOptions, Key, SegmentPart
from rl_core.transports import frames, rpc_wire
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.transports.shared_memory import LentMemory, SegmentLoan
from rl_core.transports.sockets import IoThread

Future = concurrent.futures.Future
CONFIRM_SECONDS = 0.005
"""Seconds that a receipt waits for a take with which it can be sent."""


class ChannelClient:
    """The connection of one process to the channel server."""

    def __init__(self, address: str, keys: KeyRing | None = None, identity: Identity | None = None) -> None:
        """Connect to the server at `address`.

        `keys` None means a job without keys. `identity` None means anonymous, which is allowed without keys only.
        """
        self.rpc = RpcClient(address, keys, identity, service="channel", share_memory=True)
        self.sender = PutSender(self.rpc)
        self.receipts = _Receipts(self.rpc)
        self.waiting: Callable[[str, str], AbstractContextManager[None]] = lambda what, on: nullcontext()
        """Returns a context manager in which this process reports that it waits. A worker process sets this attribute to `Worker.waiting`."""
        self._registrations: dict[str, list[int]] = {}
        """Numbers of this process's producers by channel."""
        self._numbers = itertools.count()

    def backend(self, name: str, options: ChannelOptions) -> "RemoteBackend":
        """Return the backend of a channel that exists on the server."""
        return RemoteBackend(self, name, options)

    def create(self, name: str, options: ChannelOptions) -> "Future[RemoteBackend]":
        """Create the channel, or connect to an existing one. The future raises ConfigError when that has other options."""
        convert = functools.partial(self.backend, name)
        return self.rpc.start_call("create", (name, options), {}, idempotent=True, convert=convert)

    def connect(self, name: str, timeout: float) -> "Future[RemoteBackend]":
        """Wait at most `timeout` seconds until the channel exists, and return its backend."""
        convert = functools.partial(self.backend, name)
        return self.rpc.start_call(
            "connect", (name, timeout), {}, timeout=timeout + MARGIN, idempotent=True, waits=True, convert=convert
        )

    def register(self, channel: str) -> "Future[None]":
        """Register one more producer of this process for `channel`."""
        number = next(self._numbers)
        self._registrations.setdefault(channel, []).append(number)
        return self.rpc.start_call("register", (channel, number), {}, idempotent=True)

    def done(self, channel: str) -> "Future[None]":
        """Mark one producer of this process for `channel` as done. Does nothing when there is none."""
        registrations = self._registrations.get(channel)
        if not registrations:
            completed: Future[None] = Future()
            completed.set_result(None)
            return completed
        return self.rpc.start_call("done", (channel, registrations.pop()), {}, idempotent=True)

    def set_epoch(self, epoch: int) -> None:
        """Send messages with the job epoch `epoch` from now on."""
        self.rpc.set_epoch(epoch)

    def close(self) -> None:
        """Close the connection. The server returns unconfirmed items of this process to their queues."""
        self.receipts.flush()
        self.rpc.close()
        self.sender.copier.shutdown(wait=False)  # what it still writes fails at the closed connection


class RemoteBackend:
    """Implements `backend.Backend` over a channel server."""

    def __init__(self, client: ChannelClient, name: str, options: ChannelOptions) -> None:
        self.options = options
        self._client = client
        self._rpc = client.rpc
        self._name = name

    def put(self, request: PutRequest) -> "Future[None]":
        """Return a future that is done when the server has accepted the item."""
        parts = frames.encode(request.item)
        self.options.check_fits(self._name, sum(memoryview(part).nbytes for part in parts))
        return self._client.sender.put(self._name, parts, request)

    def put_copies(self, request: PutRequest, keys: Sequence[Key]) -> "Future[None]":
        """Return a future that is done when the server has accepted the item under each of `keys`, in place of the key of the request."""
        return self._client.sender.put(self._name, frames.encode(request.item), request, keys)

    def allocate(self, nbytes: int) -> "Future[LentMemory | None]":
        """Borrow memory of the server.

        The result of the future is None if the server's shared memory is full, or if this process does not share memory with the server.
        """

        def lent(part: SegmentPart | None) -> LentMemory | None:
            return None if part is None else self._rpc.lent(SegmentLoan(part.segment, part.generation), part.nbytes)

        return self._rpc.start_call("allocate", (self._name, nbytes), {}, convert=lent)

    def take(self, request: TakeRequest) -> "Future[list[Delivery]]":
        """Request items. Returns a future of the received items."""
        receipts = self._client.receipts.collect()
        args = (
            self._name, request.key, request.timeout, request.nowait, request.target, request.most, request.allow_oversize,
            receipts,
        )  # fmt: skip
        try:
            timeout = request.timeout + MARGIN
            future = self._rpc.start_call("take", args, {}, timeout=timeout, waits=True, convert=_deliveries)
        except BaseException:
            self._client.receipts.put_back(receipts)
            raise
        if receipts:
            future.add_done_callback(lambda take: self._client.receipts.restore(receipts, take))
        return future

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager. While its block runs, this process reports that it waits for `what` at this channel: "items" or "room"."""
        return self._client.waiting(what, f"channel {self._name}")

    def load(self, delivery: Delivery) -> Any:
        """Decode the item; large arrays view the server's segments."""
        return frames.decode(
            [
                self._rpc.borrow(SegmentLoan(part.segment, part.generation), part.offset, part.nbytes)
                if isinstance(part, SegmentPart)
                else part
                for part in delivery.payload
            ]
        )

    def confirm(self, tokens: list[str]) -> None:
        """Report items as received, with the next take or a little later."""
        self._client.receipts.add(self._name, tokens)

    def requeue(self, deliveries: list[Delivery], *, loaded: bool = False) -> None:
        """Return items that no user received to their queue. Their segments are returned too, or when the last array over them is deleted."""
        if not deliveries:
            return
        for delivery in [] if loaded else deliveries:
            for loan in payload.loans(delivery.payload):
                self._rpc.release(loan)
        tokens = [delivery.token for delivery in deliveries]
        self._rpc.start_call("requeue", (self._name, tokens), {}, idempotent=True)

    def control(self, verb: str, *args: Any) -> "Future[Any]":
        """Start one of the verbs of `backend.Backend`."""
        if verb == "register":
            return self._client.register(self._name)
        if verb == "done":
            return self._client.done(self._name)
        if verb == "close":
            key, error = args
            args = (key, None if error is None else rpc_wire.pack_error(error))
        return self._rpc.start_call(verb, (self._name, *args), {}, idempotent=True)


class _Receipts:
    """Tokens of received items on their way to the server. Thread-safe."""

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc
        self._io = IoThread.shared()
        self._pending: dict[str, list[str]] = {}
        self._armed = False
        self._lock = threading.Lock()
        """Guards the two above: any thread receives items, the I/O thread sends what waited too long."""

    def add(self, channel: str, tokens: list[str]) -> None:
        """Confirm `tokens` with the next take, at the latest after CONFIRM_SECONDS."""
        if not tokens:
            return
        with self._lock:
            self._pending.setdefault(channel, []).extend(tokens)
            armed, self._armed = self._armed, True
        if not armed:
            self._io.call_at(self._io.clock() + CONFIRM_SECONDS, self.flush)

    def collect(self) -> dict[str, list[str]]:
        """Remove and return the tokens that wait, to be sent with a take."""
        with self._lock:
            pending, self._pending = self._pending, {}
            return pending

    def restore(self, receipts: dict[str, list[str]], take: "Future[Any]") -> None:
        """Send the receipts of a failed take again, because it may not have arrived. The server ignores receipts that it knows."""
        if take.cancelled() or take.exception() is not None:
            self.put_back(receipts)

    def put_back(self, receipts: dict[str, list[str]]) -> None:
        """Add receipts again that were collected and not sent."""
        for channel, tokens in receipts.items():
            self.add(channel, tokens)

    def flush(self) -> None:
        """Send the tokens that wait in a message of their own."""
        with self._lock:
            self._armed = False
        if pending := self.collect():
            self._rpc.start_call("confirm", (pending,), {}, idempotent=True)


def _deliveries(rows: list[list[Any]]) -> list[Delivery]:
    return [Delivery(token, parts) for token, parts in rows]


_current: ChannelClient | None = None


def configure(address: str, keys: KeyRing | None = None, identity: Identity | None = None) -> ChannelClient:
    """Set and return the client that Channel uses in this process, in place of an earlier one, which is closed."""
    global _current
    earlier, _current = _current, ChannelClient(address, keys, identity)
    if earlier is not None:
        earlier.close()
    return _current


def release() -> None:
    """Close the client that `configure` has set. Operations under way fail."""
    global _current
    earlier, _current = _current, None
    if earlier is not None:
        earlier.close()


def current() -> ChannelClient:
    """Return the configured client. Raises ConfigError when there is none."""
    if _current is None:
        raise ConfigError(
            "this process has no channel server; use channels inside `with Cluster.local(...)` or create the channel with local=True"
        )
    return _current
