"""A process's connection to the channel server; `configure` sets the one that Channel uses.

Receipts of `get` ride on the next take or leave a little later; leases are renewed by the I/O thread while their Delivery
lives. How items get to the server is told in `puts`.
"""

import concurrent.futures
import functools
import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.channel import payload
from rl_core.channel.backend import PutRequest, Taken, TakeRequest
from rl_core.channel.model import ChannelOptions
from rl_core.channel.puts import MARGIN, Target, Uplink
from rl_core.transports import frames, rpc_wire
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.transports.shared_memory import Placement
from rl_core.transports.sockets import IoThread, Timer

if TYPE_CHECKING:
    from rl_core.channel.delivery import Delivery

logger = logging.getLogger(__name__)

Future = concurrent.futures.Future
CONFIRM_SECONDS = 0.005
"""How long receipts wait for a take to ride on."""


class ChannelClient:
    """One per process. `identity` None = anonymous, legal without keys only."""

    def __init__(self, address: str, keys: KeyRing | None = None, identity: Identity | None = None) -> None:
        self.rpc = RpcClient(address, keys, identity, service="channel", share_memory=True, on_welcome=self._on_welcome)
        self.uplink = Uplink(self.rpc)
        self.receipts = _Receipts(self.rpc)
        self.leases = _Leases(self.rpc)
        self._registrations: dict[str, list[int]] = {}
        """Numbers of this process's producers by channel."""
        self._numbers = itertools.count()

    def backend(self, name: str, options: ChannelOptions) -> "RemoteBackend":
        """Return the backend of a channel known to exist."""
        return RemoteBackend(self, name, options)

    def create(self, name: str, options: ChannelOptions) -> "Future[Any]":
        """Create the channel or connect to its equal. The future raises ConfigError when it differs."""
        return self.rpc.start_call(
            "create", (name, options), {}, idempotent=True, convert=functools.partial(self.backend, name)
        )

    def connect(self, name: str, timeout: float) -> "Future[Any]":
        """Wait until the channel exists."""
        convert = functools.partial(self.backend, name)
        return self.rpc.start_call(
            "connect", (name, timeout), {}, timeout=timeout + MARGIN, idempotent=True, waits=True, convert=convert
        )

    def register(self, channel: str) -> "Future[None]":
        """Count one more producer of this process."""
        number = next(self._numbers)
        self._registrations.setdefault(channel, []).append(number)
        return self.rpc.start_call("register", (channel, number), {}, idempotent=True)

    def done(self, channel: str) -> "Future[None]":
        """Count one producer of this process less; without effect when there is none."""
        registrations = self._registrations.get(channel)
        if not registrations:
            ended: Future[None] = Future()
            ended.set_result(None)
            return ended
        return self.rpc.start_call("done", (channel, registrations.pop()), {}, idempotent=True)

    def set_epoch(self, epoch: int) -> None:
        """Send `epoch` from now on."""
        self.rpc.set_epoch(epoch)

    def close(self) -> None:
        """Close the connection; the server returns what this process holds."""
        self.leases.close()
        self.receipts.flush()
        self.rpc.close()
        self.uplink.copier.shutdown(wait=False)  # what it still writes fails at the closed connection

    def _on_welcome(self, known: bool) -> None:
        if not known and hasattr(self, "uplink"):  # the first welcome may come before the constructor ends
            self.uplink.spares.clear()


class RemoteBackend:
    """Implements `backend.Backend` over a channel server."""

    def __init__(self, client: ChannelClient, name: str, options: ChannelOptions) -> None:
        self.options = options
        self._client = client
        self._rpc = client.rpc
        self._name = name

    def put(self, request: PutRequest) -> "Future[None]":
        """Return a future that is done when the server has accepted the items."""
        encoded = [payload.encode(item) for item in request.items]
        self.options.check_fits(self._name, [payload.nbytes(parts) for parts in encoded])
        shape = [[weight, len(parts)] for weight, parts in zip(request.weights, encoded, strict=True)]
        ack = request.ack
        target = Target(
            self._name, request.key, shape, request.timeout, request.nowait,
            None if ack is None else self._lease(ack), IoThread.shared().clock(),
        )  # fmt: skip
        future = self._client.uplink.put(list(itertools.chain.from_iterable(encoded)), target)
        if ack is not None:
            future.add_done_callback(lambda done: self._client.leases.end_with(ack.token, done))
        return future

    def _lease(self, delivery: "Delivery") -> list[str]:
        """Return (channel, token) of a lease of the same server. Raises ValueError for another's."""
        backend = delivery.backend
        if not isinstance(backend, RemoteBackend) or backend._client is not self._client:
            raise ValueError("ack must be a delivery of the same channel server as the put; acknowledge it by itself")
        return [backend._name, delivery.token]

    def take(self, request: TakeRequest) -> "Future[list[Taken]]":
        """Return a future of what was taken."""
        receipts = self._client.receipts.collect()
        args = (self._name, request.key, request.kind, request.timeout, receipts)
        options: dict[str, Any] = {"nowait": request.nowait}
        if request.kind == "batch":
            options |= {"target": request.target, "allow_oversize": request.allow_oversize}
        elif request.most > 1:
            options["most"] = request.most
        try:
            timeout = request.timeout + MARGIN
            future = self._rpc.start_call("take", args, options, timeout=timeout, waits=True, convert=_rows)
        except BaseException:
            self._client.receipts.put_back(receipts)
            raise
        if receipts:
            future.add_done_callback(lambda done: self._client.receipts.restore(receipts, done))
        return future

    def load(self, taken: Taken) -> Any:
        """Decode the item; large arrays view the server's segments."""
        parts = [
            self._rpc.borrow(Placement(part[0], part[1]), part[2]) if isinstance(part, list) else part
            for part in taken.payload
        ]
        return frames.decode(parts)

    def confirm(self, tokens: list[str]) -> None:
        """Tell the server, with the next take or a little later, that items arrived."""
        self._client.receipts.add(self._name, tokens)

    def give_back(self, taken: list[Taken], *, lost: bool = False, loaded: bool = False) -> None:
        """Return items nobody got, and the memory they lie in unless arrays over it will."""
        for entry in taken:
            for spot in [] if loaded else payload.placements(entry.payload):
                self._rpc.give_back(spot)
            self._rpc.start_call("nack", (self._name, entry.token, 0.0, lost), {})

    def watch(self, delivery: Any) -> None:
        """Renew the lease while the object lives."""
        self._client.leases.add(self._name, delivery, self.options.lease_seconds)

    def control(self, verb: str, *args: Any) -> "Future[Any]":
        """Start one of the verbs of `backend.Backend`."""
        if verb == "register":
            return self._client.register(self._name)
        if verb == "done":
            return self._client.done(self._name)
        call = functools.partial(self._rpc.start_call, verb)
        if verb == "ack":
            self._client.leases.forget(args[0])
            return call((self._name, *args), {})
        if verb == "nack":
            self._client.leases.forget(args[0])
            return call((self._name, *args), {})
        if verb == "extend":
            return call((self._name, [args[0]], args[1]), {}, convert=lambda stale: not stale)
        if verb == "dead":
            return call((self._name, *args), {}, idempotent=True, convert=_rows)
        if verb == "close":
            key, error = args
            return call((self._name, key, None if error is None else rpc_wire.pack_error(error)), {}, idempotent=True)
        return call((self._name, *args), {}, idempotent=True)


class _Receipts:
    """Tokens of received items on their way to the server. Thread-safe."""

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc
        self._io = IoThread.shared()
        self._pending: dict[str, list[str]] = {}
        self._armed = False
        self._lock = threading.Lock()

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
        """Return what waits, to ride on a take."""
        with self._lock:
            pending, self._pending = self._pending, {}
            return pending

    def restore(self, receipts: dict[str, list[str]], take: "Future[Any]") -> None:
        """Send receipts again whose take may not have arrived; the server ignores what it knows."""
        if take.cancelled() or take.exception() is not None:
            self.put_back(receipts)

    def put_back(self, receipts: dict[str, list[str]]) -> None:
        """Let receipts that did not travel wait again."""
        for channel, tokens in receipts.items():
            self.add(channel, tokens)

    def flush(self) -> None:
        """Send what waits."""
        self._armed = False
        if pending := self.collect():
            self._rpc.start_call("confirm", (pending,), {}, idempotent=True)


class _Leases:
    """Deliveries that live in this process; their leases are renewed every third of their length."""

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc
        self._io = IoThread.shared()
        self._held: dict[str, tuple[str, weakref.ref[Any]]] = {}
        self._interval = float("inf")
        self._timer: Timer | None = None
        self._closed = False

    def add(self, channel: str, delivery: Any, lease_seconds: float) -> None:
        """Renew `delivery` from now on."""
        self._held[delivery.token] = (channel, weakref.ref(delivery))
        self._io.call_soon(self._arm, lease_seconds / 3)

    def forget(self, token: str) -> None:
        """Renew no more: acknowledged or given back."""
        self._held.pop(token, None)

    def end_with(self, token: str, put: "Future[None]") -> None:
        """Renew no more if `put`, which was to acknowledge the lease, was accepted."""
        if not put.cancelled() and put.exception() is None:
            self.forget(token)

    def close(self) -> None:
        """Renew nothing any more."""
        self._closed = True
        self._held.clear()

    def _arm(self, interval: float) -> None:
        if self._timer is None or interval < self._interval:
            if self._timer is not None:
                self._timer.cancel()
            self._interval = interval
            self._timer = self._io.call_at(self._io.clock() + interval, self._renew)

    def _renew(self) -> None:
        interval, self._timer, self._interval = self._interval, None, float("inf")
        by_channel: dict[str, list[str]] = {}
        for token, (channel, delivery) in list(self._held.items()):
            if delivery() is None:
                self._held.pop(token, None)
            else:
                by_channel.setdefault(channel, []).append(token)
        for channel, tokens in by_channel.items():
            self._rpc.start_call("extend", (channel, tokens, None), {}, idempotent=True, convert=self._drop_stale)
        if by_channel and not self._closed:
            self._arm(interval)

    def _drop_stale(self, stale: list[str]) -> None:
        for token in stale:
            if self._held.pop(token, None) is not None:  # else acknowledged while the renewal was under way
                logger.warning("a lease ended before its delivery was acknowledged; another consumer has the item")


def _rows(rows: list[Any]) -> list[Taken]:
    return [Taken(*row) for row in rows]


_current: ChannelClient | None = None


def configure(address: str, keys: KeyRing | None = None, identity: Identity | None = None) -> ChannelClient:
    """Set and return the client that Channel uses in this process, in place of an earlier one, which is closed."""
    global _current
    earlier, _current = _current, ChannelClient(address, keys, identity)
    if earlier is not None:
        earlier.close()
    return _current


def current() -> ChannelClient:
    """Return the configured client. Raises ConfigError when there is none."""
    if _current is None:
        raise ConfigError(
            "this process has no channel server; call rl_core.channel.client.configure(address) or create the channel with local=True"
        )
    return _current
