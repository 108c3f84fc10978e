"""The serving end of RPC: one ROUTER socket on the I/O thread, handlers elsewhere. See `rpc` for the protocol.

`RpcServer` owns the socket and its peers; a `Peer` is one connected client; an `IncomingCall` is one request. What the
process knows of a client (ids it sent, segments it holds, its role) ends when ZeroMQ cannot route to it for LOST_SECONDS.
"""

import concurrent.futures
import functools
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from typing import Any

import zmq

from rl_core.api.errors import ConfigError, EpochFenced, FrameError
from rl_core.api.identity import Identity
from rl_core.messages.rpc import Caller, Hello, Welcome
from rl_core.transports import curve, frames, rpc_wire, shared_memory, sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.frames import FrameHeader
from rl_core.transports.handlers import HandlerRunner, Running
from rl_core.transports.links import Link, SharedMemory
from rl_core.transports.sockets import IoThread

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
_FORGOTTEN = 256
"""Lost clients whose finished ids a server remembers."""
_BATCH = 64
"""Most messages taken before other sockets have their turn."""


def inline(handler: Handler) -> Handler:
    """Mark a handler that runs on the I/O thread as `handler(call, *args)` and answers through `call`, at once or later.

    For code of this package that never blocks (the channel); user code must not be inline.
    """
    handler.rpc_inline = True  # type: ignore[attr-defined]
    return handler


class Peer:
    """One client of a server. Touched under the server's lock only."""

    def __init__(self, server: "RpcServer", routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.caller: Caller | None = None
        """None while anonymous."""
        self.welcome = False
        self.link = Link(functools.partial(server._send, self, "release"), server.counters)
        self.calls: dict[int, IncomingCall] = {}
        self.finished: OrderedDict[int, bool] = OrderedDict()
        """Ids of ended calls -> whether the answer could be sent."""
        self.unreachable_since: float | None = None

    @property
    def name(self) -> str:
        """`group:rank`, or "anonymous"."""
        return rpc_wire.name_of(self.caller)


class IncomingCall:
    """One request: its arguments, and the ways to answer it. Any thread may answer; only the first answer counts."""

    def __init__(self, server: "RpcServer", peer: Peer, header: FrameHeader, parts: list[Any]) -> None:
        self.peer = peer
        self.caller = peer.caller
        self.cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        """For inline handlers: run on the I/O thread when the caller gives up or is gone."""
        self.id: int = header.request_id
        self.method = header.method or ""
        self.streams = header.options.get("stream") is True
        self.header = header
        self.running: Running | None = None
        self._server = server
        self._parts = parts
        self._untouched = True

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Decode and return the arguments. Raises FrameError when the body does not hold."""
        self._untouched = False
        body = frames.read_body(self.header, self._parts, resolve=self.peer.link.resolve)
        self._parts = []
        if type(body) is not list or len(body) != 2 or type(body[0]) is not list or type(body[1]) is not dict:
            raise FrameError(f"arguments of {self.method} must be [positional, named]")
        return body[0], body[1]

    def reply(self, value: Any) -> bool:
        """Answer with `value`, or with the error of a value that cannot travel; tell whether it could."""
        return self._answer("reply", value)

    def fail(self, error: BaseException) -> None:
        """Answer with `error`."""
        self._answer("error", rpc_wire.pack_error(error))

    def item(self, value: Any) -> None:
        """Send one item of a stream."""
        self._server._deliver(self, self._encode("item", value), False)

    def end(self) -> None:
        """End a stream."""
        self._answer("end", None)

    def _answer(self, kind: str, value: Any) -> bool:
        if self._untouched:  # refused or cancelled before anybody looked at them
            self._untouched = False
            self.peer.link.discard(self.header)
        travels = True
        try:
            parts = self._encode(kind, value)
        except (TypeError, ValueError) as error:
            travels, parts = False, self._encode("error", rpc_wire.pack_error(error))
        self._server._deliver(self, parts, True)
        return travels

    def _encode(self, kind: str, value: Any) -> list[Any]:
        place = self.peer.link.place if self.peer.link.lends and self._server._lend_replies else None
        return frames.encode_message(
            kind, value, epoch=self._server.epoch, request_id=self.id, sender=None, place=place
        )


class RpcServer:
    """Serves `handlers` (a mapping, or the public methods of an object) at `bind`, `tcp://host:port`, port 0 = a free one.

    `keys` None: loopback only. `allowed` maps a caller's role to the methods it may call (roles absent may call none; None
    = no restriction). `service` (None = by the identity's role) names the entry of curve.ALLOWED. Methods in `unfenced`
    answer callers of older epochs too (the hub's hello). `lend_replies`: large arrays of answers may travel in segments of this
    process. `on_peer`, `on_peer_lost` and `on_late_cancel` (a caller gave up a call that was answered) run on the I/O thread.
    Raises ConfigError on `start` when the address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        handlers: Mapping[str, Handler] | object,
        keys: KeyRing | None = None,
        identity: Identity | None = None,
        *,
        max_concurrency: int = 64,
        executor: concurrent.futures.Executor | None = None,
        allowed: Mapping[str, Set[str]] | None = None,
        service: str | None = None,
        unfenced: frozenset[str] = frozenset(),
        share_memory: bool = True,
        lend_replies: bool = True,
        on_peer: Callable[[Peer], None] | None = None,
        on_peer_lost: Callable[[Peer], None] | None = None,
        on_late_cancel: Callable[[Peer, int], None] | None = None,
    ) -> None:
        sockets.check_reach(bind, has_keys=keys is not None, verb="bind")
        self.counters: Counter[str] = Counter()
        """calls, malformed, fenced, duplicates, unreachable, lost_peers, refused_methods, shared_memory(_full)."""
        self.epoch: int | None = identity.epoch if identity is not None else None
        self.address = ""
        """`tcp://host:port` to connect to, once started."""
        self._bind, self._keys, self._identity = bind, keys, identity
        self._handlers = dict(handlers) if isinstance(handlers, Mapping) else _public_methods(handlers)
        self._allowed, self._unfenced = allowed, unfenced
        role = keys.role if keys is not None else ""
        self.service = service or {"runner": "hub"}.get(role, role)
        self._share_memory = share_memory
        self._lend_replies = lend_replies
        self._on_peer, self._on_peer_lost, self._on_late_cancel = on_peer, on_peer_lost, on_late_cancel
        self._runner = HandlerRunner(max_concurrency=max_concurrency, executor=executor)
        self._io = IoThread.shared()
        self._lock = threading.RLock()
        """Guards the socket and all below: handler threads send their answers themselves."""
        self._socket: zmq.Socket[Any] | None = None
        self._receiving = False
        self._peers: dict[bytes, Peer] = {}
        self._forgotten: OrderedDict[bytes, OrderedDict[int, bool]] = OrderedDict()
        """Ids that lost clients have run, for those that come back: what they send again is not run twice."""
        self._instance = os.urandom(8)
        self._probe: sockets.Timer | None = None
        self._unconfirmed: list[IncomingCall] = []

    def start(self) -> "RpcServer":
        """Bind and serve; returns self."""
        self._io.run(self._open)
        return self

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve more methods. Raises ValueError when a name is taken."""
        for name, handler in handlers.items():
            if name in self._handlers:
                raise ValueError(
                    f"method {name!r} is already served at {self.address or self._bind}; choose another name"
                )
            self._handlers[name] = handler

    def set_epoch(self, epoch: int) -> None:
        """Refuse messages of epochs older than `epoch` from now on."""
        self.epoch = epoch

    def refused(self) -> int:
        """Return how many connections were refused because of their key."""
        return curve.refused(self.service)

    def close(self) -> None:
        """Stop serving; calls under way are cancelled where they can be."""
        self._io.run(self._shut)
        self._runner.close()

    def peers(self) -> list[Peer]:
        """Return the connected clients."""
        with self._lock:
            return list(self._peers.values())

    # --- below: on the I/O thread, or under the lock ---

    def _open(self) -> None:
        socket = self._io.context.socket(zmq.ROUTER)
        sockets.configure(socket)
        try:
            if self._keys is not None:
                self._keys.serve(socket, self.service)
            self.address = sockets.bind(socket, self._bind)
        except BaseException:
            socket.close(0)
            raise
        self._socket = socket
        self._io.register(socket, self._receive_all)

    def _shut(self) -> None:
        with self._lock:
            if self._socket is None:
                return
            self._io.unregister(self._socket)
            for peer in list(self._peers.values()):
                self._forget(peer)
            if self._probe is not None:
                self._probe.cancel()
            self._socket.close()
            self._socket = None

    def _receive_all(self) -> None:
        with self._lock:
            self._receiving = True
            try:
                for _ in range(_BATCH):
                    if self._socket is None or not sockets.readable(self._socket):
                        return
                    self._receive(sockets.receive(self._socket))
            finally:
                self._receiving = False
        self._io.call_soon(self._receive_all)  # the other sockets have their turn first

    def _receive(self, parts: list[Any]) -> None:
        try:
            self._dispatch(parts[0].bytes, frames.read_header(parts[1].buffer), parts)
        except Exception as error:  # whatever a peer sends: the messages after it must be read
            self.counters["malformed"] += 1
            known = isinstance(error, (FrameError, IndexError))
            logger.warning("dropped a malformed message at %s: %r", self.address, error, exc_info=not known)

    def _dispatch(self, routing_id: bytes, header: FrameHeader, parts: list[Any]) -> None:
        peer = self._peers.get(routing_id)
        role = parts[1].get("User-Id") if self._keys is not None else None
        if header.kind == "hello":
            self._hello(peer or Peer(self, routing_id), role, frames.read_body(header, parts[2:]))
            return
        if (
            peer is None
            or not peer.welcome
            or (role is not None and peer.caller is not None and not _same_role(peer.caller, role))
        ):
            self._send(peer or Peer(self, routing_id), "who", None)
        elif header.kind == "call":
            self._call(peer, header, parts[2:])
        elif header.kind == "cancel":
            self._cancel(peer, header.request_id)
        elif header.kind == "credit":
            call = peer.calls.get(header.request_id)
            if call is not None and call.running is not None:
                call.running.window.grant(int(frames.read_body(header, parts[2:])))
        elif header.kind == "release":
            peer.link.take_back(frames.read_body(header, parts[2:]))
        elif header.kind == "bye":
            self._forget(peer)
        elif header.kind == "attach":
            peer.link.lends = self._share_memory and frames.read_body(header, parts[2:]) is True

    def _hello(self, peer: Peer, role: str | None, hello: Any) -> None:
        if not isinstance(hello, Hello) or not isinstance(hello.caller, Caller | None):
            raise FrameError(f"hello must be a Hello, got {type(hello).__name__}")
        refusal = self._refusal(role, hello.caller)
        if refusal:
            self._send(peer, "refused", refusal)
            return
        shared = SharedMemory.shared(self._identity.uid if self._identity else "") if self._share_memory else None
        if peer.welcome:
            for number in peer.calls.keys() - set(hello.pending):  # given up while the connection was lost
                self._cancel(peer, number)
        else:
            peer.finished = self._forgotten.pop(peer.routing_id, peer.finished)
        answer = Welcome(
            caller=Caller.of(self._identity),
            instance=self._instance,
            known=peer.welcome,
            memory=shared.token.proof if shared is not None else None,
            readable=shared is not None and shared_memory.readable(hello.memory),
            running=tuple(number for number in hello.pending if number in peer.calls),
            finished=tuple(number for number in hello.pending if number in peer.finished),
        )
        self._peers[peer.routing_id] = peer
        peer.caller, peer.welcome = hello.caller, True
        self._send(peer, "welcome", answer)
        if self._on_peer is not None:
            self._on_peer(peer)
        self._start_probe()

    def _refusal(self, role: str | None, caller: Caller | None) -> str:
        """Return why a connection of `caller`, whose key is that of `role` (None = no keys), is refused; "" if it is not."""
        if role is not None and (caller is None or not _same_role(caller, role)):
            return f"the key is that of role {role}, the message says {caller and caller.role}"
        if caller is not None and self._identity is not None and caller.uid != self._identity.uid:
            own = self._identity
            return f"this is job {own.job} ({own.uid}), not {caller.job} ({caller.uid})"
        return ""

    def _call(self, peer: Peer, header: FrameHeader, parts: list[Any]) -> None:
        number = header.request_id
        if type(number) is not int:
            raise FrameError("request id must be an integer")
        if number in peer.calls or (number in peer.finished and not header.options.get("idempotent")):
            self.counters["duplicates"] += 1
            return
        self.counters["calls"] += 1
        call = peer.calls[number] = IncomingCall(self, peer, header, parts)
        handler = self._handlers.get(call.method)
        problem = self._problem(call, handler)
        if problem is not None or handler is None:
            call.fail(problem or AssertionError("bug: a missing handler is a problem"))
        elif getattr(handler, "rpc_inline", False):
            self._run_inline(call, handler)
        else:
            self._confirm_later(call)
            call.running = self._runner.submit(call, handler)

    def _problem(self, call: IncomingCall, handler: Handler | None) -> Exception | None:
        epoch = call.header.epoch
        if epoch is not None and self.epoch is not None and epoch < self.epoch and call.method not in self._unfenced:
            self.counters["fenced"] += 1
            return EpochFenced(
                f"{call.method} came from epoch {epoch} of {call.peer.name}, {self._name} is at epoch {self.epoch}; the sender must reset"
            )
        if handler is None:
            return ConfigError(
                f"{self._name} has no method {call.method!r}; it serves {', '.join(sorted(self._handlers))}"
            )
        role = call.caller.role if call.caller else ""
        if self._allowed is not None and call.method not in self._allowed.get(role, frozenset()):
            self.counters["refused_methods"] += 1
            return ConfigError(f"role {role or 'anonymous'} may not call {call.method!r} of {self._name}")
        return None

    @property
    def _name(self) -> str:
        return f"{self._identity.name if self._identity else 'the server'} at {self.address}"

    def _run_inline(self, call: IncomingCall, handler: Handler) -> None:
        try:
            args, kwargs = call.arguments()
            handler(call, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the caller hears it; the loop goes on
            call.fail(error)

    def _confirm_later(self, call: IncomingCall) -> None:
        timeout = call.header.options.get("timeout")
        if isinstance(timeout, (int, float)) and timeout <= 2 * rpc_wire.RECEIPT_SECONDS:
            self._send(call.peer, "received", [call.id])
            return
        if not self._unconfirmed:
            self._io.call_at(self._io.clock() + rpc_wire.RECEIPT_SECONDS, self._confirm)
        self._unconfirmed.append(call)

    def _confirm(self) -> None:
        with self._lock:
            self._confirm_received()

    def _confirm_received(self) -> None:
        calls, self._unconfirmed = self._unconfirmed, []
        by_peer: dict[bytes, list[int]] = {}
        for call in calls:
            if call.id in call.peer.calls:
                by_peer.setdefault(call.peer.routing_id, []).append(call.id)
        for routing_id, numbers in by_peer.items():
            if (peer := self._peers.get(routing_id)) is not None:
                self._send(peer, "received", numbers)

    def _cancel(self, peer: Peer, number: int) -> None:
        call = peer.calls.get(number)
        if call is None:
            if self._on_late_cancel is not None:
                self._on_late_cancel(peer, number)
            return
        call.cancelled = True
        if call.on_cancel is not None:
            call.on_cancel()
        elif call.running is not None:
            call.running.cancel()

    def _deliver(self, call: IncomingCall, parts: list[Any], last: bool) -> None:
        peer = call.peer
        with self._lock:
            known = peer.calls.get(call.id) is call
            sent = known and self._send_parts(peer, parts)
            if not sent:
                peer.link.retract(parts)
            if not (known and last):
                return
            del peer.calls[call.id]
            peer.finished[call.id] = sent
            if len(peer.finished) > rpc_wire.REMEMBERED_IDS:
                peer.finished.popitem(last=False)

    def _send(self, peer: Peer, kind: str, value: Any) -> bool:
        return self._send_parts(
            peer, frames.encode_message(kind, value, epoch=self.epoch, request_id=None, sender=None)
        )

    def _send_parts(self, peer: Peer, parts: list[Any]) -> bool:
        with self._lock:
            if self._socket is None:
                return False
            try:
                sockets.send(self._socket, [peer.routing_id, *parts])
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.counters["unreachable"] += 1
                return False
            if not self._receiving and sockets.readable(self._socket):  # sending may swallow the news
                self._io.call_soon(self._receive_all)
            return True

    def _start_probe(self) -> None:
        if self._probe is None:
            self._probe = self._io.call_at(self._io.clock() + rpc_wire.PROBE_SECONDS, self._probe_peers)

    def _probe_peers(self) -> None:
        with self._lock:
            self._probe_all()

    def _probe_all(self) -> None:
        self._probe = None
        now = self._io.clock()
        for peer in list(self._peers.values()):
            if self._send(peer, "ping", None):
                peer.unreachable_since = None
            elif peer.unreachable_since is None:
                peer.unreachable_since = now
            elif now - peer.unreachable_since >= rpc_wire.LOST_SECONDS:
                self.counters["lost_peers"] += 1
                logger.info("%s lost its client %s", self._name, peer.name)
                self._forget(peer)
        if self._peers:
            self._start_probe()

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.routing_id, None)
        begun = {call.id: False for call in peer.calls.values() if call.running is not None}
        self._forgotten[peer.routing_id] = OrderedDict({**peer.finished, **begun})
        if len(self._forgotten) > _FORGOTTEN:
            self._forgotten.popitem(last=False)
        for call in list(peer.calls.values()):
            self._cancel(peer, call.id)
        peer.calls.clear()
        peer.link.lost()
        if self._on_peer_lost is not None:
            self._on_peer_lost(peer)


def _public_methods(target: object) -> dict[str, Handler]:
    names = (name for name in dir(type(target)) if not name.startswith("_"))
    return {name: getattr(target, name) for name in names if callable(getattr(type(target), name))}


def _same_role(caller: Caller, role: str) -> bool:
    """Return whether the owner of a key may say it is `caller`: a supervisor has the key of its pod's role."""
    return caller.role in (role, "supervisor")
