"""The server of RPC: a ROUTER socket that the I/O thread reads, and handlers on other threads. See `rpc` for the protocol.

The state of a client (request ids, segments that it holds, its role) is dropped when ZeroMQ cannot route to it for LOST_SECONDS. A handler
sends its reply on its own thread. While several other calls of the same client are under way, the I/O thread sends it, together with those
that have come meanwhile. One lock guards the socket and the tables of requests; no handler and no callback runs under it. A thread that waits
for work may read the socket in place of the I/O thread (`read_until`).
"""

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import zmq

from rl_core.api.errors import ConfigError, EpochFenced, FrameError
from rl_core.api.identity import Identity
from rl_core.messages.rpc import Caller, Hello, Welcome
from rl_core.plan.groups import SCRIPT_WORKERS
from rl_core.transports import curve, frames, rpc_wire, sockets, tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.frames import FrameHeader
from rl_core.transports.handlers import HandlerRunner
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.message_batches import batched, is_small, unbatched
from rl_core.transports.rpc_incoming import IncomingCall, Peer
from rl_core.transports.sockets import IoThread
from rl_core.transports.waiting_reader import WaitingReader

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
_MAX_LOST_CLIENTS = 4_096
"""Lost clients whose request ids a server remembers. A cut of the network may lose all clients of a job at once."""
_KEPT_IDS = 256
"""Answered requests that a server remembers of a lost client: the newest ones, whose answers may have been lost with the connection."""
_MOST_IN_TURN = 64
"""Most messages taken before other sockets have their turn."""
_BUSY_CALLS = 2
"""If this many other calls of a client are under way, the I/O thread sends small replies to it."""


def inline(handler: Handler) -> Handler:
    """Mark a handler that runs on the I/O thread as `handler(call, *args)` and replies through `call`, at once or later.

    Only for code of this package that never blocks, such as the channel.
    """
    handler.rpc_inline = True  # type: ignore[attr-defined]
    return handler


def scheduling(handler: Handler) -> Handler:
    """Mark a handler that runs as `handler(call)` on the I/O thread and only chooses where the call runs.

    The arguments are not decoded yet: the code that runs the call calls `call.arguments()`, on its own thread.
    """
    handler.rpc_scheduling = True  # type: ignore[attr-defined]
    return handler


class RpcServer:
    """Serves `handlers`, a mapping or the public methods of an object, at `bind`: `tcp://host:port`, where port 0 means any free port.

    At most `max_concurrency` functions and as many coroutines run at a time. Without `keys` it serves the loopback interface only.
    `allowed` maps the role of a caller to the methods that it may call; a role that is not in it may call none, and None allows all.
    `service` is the entry of `curve.callers_of_services`, by default that of the identity's role. Methods in `unfenced`, such as the hub's
    hello, also serve callers of older epochs. With `share_memory` the server finds out which clients see the same /dev/shm, and frees the
    segments that they release. `on_peer`, `on_peer_lost` and `on_late_cancel` run on the I/O thread; the last one is called when a caller
    cancels a call after the reply. `start` raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        handlers: Mapping[str, Handler] | object,
        keys: KeyRing | None = None,
        identity: Identity | None = None,
        *,
        max_concurrency: int = 64,
        allowed: Mapping[str, Set[str]] | None = None,
        service: str | None = None,
        unfenced: frozenset[str] = frozenset(),
        share_memory: bool = False,
        on_peer: Callable[[Peer], None] | None = None,
        on_peer_lost: Callable[[Peer], None] | None = None,
        on_late_cancel: Callable[[Peer, int], None] | None = None,
    ) -> None:
        sockets.check_reach(bind, has_keys=keys is not None, verb="bind")
        self.counters: Counter[str] = Counter()
        """calls, malformed, fenced, duplicates, unreachable, lost_peers, refused_methods."""
        self.epoch: int | None = identity.epoch if identity is not None else None
        self.address = ""
        """`tcp://host:port` to connect to, once started."""
        self._bind, self._keys, self._identity = bind, keys, identity
        self._handlers = dict(handlers) if isinstance(handlers, Mapping) else _public_methods(handlers)
        self._allowed, self._unfenced = allowed, unfenced
        role = keys.role if keys is not None else ""
        self.service = service or {"runner": "hub"}.get(role, role)
        self._share_memory = share_memory
        self._on_peer, self._on_peer_lost, self._on_late_cancel = on_peer, on_peer_lost, on_late_cancel
        self._runner = HandlerRunner(threads=max_concurrency, coroutines=max_concurrency)
        self._io = IoThread.shared()
        self._lock = threading.RLock()
        """Guards the socket, `_peers`, `_forgotten`, and the request tables of peers: handlers reply on their own threads."""
        self._socket: zmq.Socket[Any] | None = None
        self._reading = False
        """Whether a thread is reading, until it finds the socket empty."""
        self._dispatching = threading.RLock()
        """Held while a message is handled, and while the timers look at the peers: the thread that reads may be another one than theirs."""
        self._reader: WaitingReader | None = None
        self._peers: dict[bytes, Peer] = {}
        self._forgotten: OrderedDict[bytes, OrderedDict[int, None]] = OrderedDict()
        """Request ids of lost clients by routing id: a request that a client sends again when it comes back is not run twice."""
        self._instance = os.urandom(8)
        self._probe: sockets.Timer | None = None
        self._confirming = False
        """Whether a timer will confirm the calls that run for long."""

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

    def read_until(self, done: Callable[[], bool]) -> bool:
        """Receive requests on this thread, which waits for one of them to make `done()` true.

        Only for servers whose handlers marked as `inline`, and whose callbacks, may run on this thread. Returns False at once when another
        thread reads or the server does not listen. See `WaitingReader`.
        """
        return self._reader is not None and self._reader.read_until(done)

    def wake_reader(self) -> None:
        """Let the thread in `read_until` look at its condition again."""
        if self._reader is not None:
            self._reader.wake()

    def set_epoch(self, epoch: int) -> None:
        """Refuse messages of epochs older than `epoch` from now on."""
        self.epoch = epoch

    def refused(self) -> int:
        """Return how many connections were refused because of their key."""
        return curve.refused(self.service)

    def close(self) -> None:
        """Stop serving. Pending calls are cancelled where possible."""
        self._io.run(self._shut)
        self._runner.close()

    # --- below: on the I/O thread ---

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
        self._reader = WaitingReader(
            self._io, socket, self._receive_all, closed=lambda: self._socket is None, lock=self._lock
        )

    def _shut(self) -> None:
        with self._dispatching:
            if self._socket is None:
                return
            for peer in list(self._peers.values()):
                self._forget(peer)
            if self._probe is not None:
                self._probe.cancel()
            with self._lock:
                self._io.unregister(self._socket)
                self._socket.close()
                self._socket = None
        self.wake_reader()

    def _receive_all(self) -> None:
        for number in range(_MOST_IN_TURN):
            with self._dispatching:
                with self._lock:
                    second = number == 1  # often there is none
                    parts = None if self._socket is None else sockets.receive(self._socket, look=second)
                    self._reading = parts is not None
                if parts is None:
                    return
                self._receive(parts)
        self._io.call_soon(self._receive_all)  # the other sockets have their turn first

    def _receive(self, parts: list[Any]) -> None:
        for message in unbatched(parts[1:]):
            try:
                self._dispatch(parts[0].bytes, parts[1], frames.read_header(message[0]), message[1:])
            except Exception as error:  # noqa: BLE001 - whatever a peer sends: the messages after it must be read
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Count and log a malformed message."""
        self.counters["malformed"] += 1
        is_expected = isinstance(error, (FrameError, IndexError))
        logger.warning(
            "dropped a malformed message at %s: %r", self.address, error, exc_info=None if is_expected else error
        )

    def _dispatch(self, routing_id: bytes, frame: Any, header: FrameHeader, parts: Sequence[Any]) -> None:
        """Handle a message that came in `frame`; `parts` are those behind its header."""
        peer = self._peers.get(routing_id)
        role = frame.get("User-Id") if self._keys is not None else None
        if header.kind == "hello":
            greeting = peer or Peer(routing_id)
            greeting.host = _host_of(frame)
            self._hello(greeting, role, frames.read_body(header, parts))
            return
        if (
            peer is None
            or not peer.welcome
            or (role is not None and peer.caller is not None and not _same_role(peer.caller, role))
        ):
            self._send(peer or Peer(routing_id), "who", None)
        elif header.kind == "call":
            self._call(peer, header, parts)
        elif header.kind == "cancel":
            self._cancel(peer, header.request_id)
        elif header.kind == "release" and self._share_memory:
            peer.loans.take_back(frames.read_body(header, parts))
        elif header.kind == "bye":
            self._forget(peer)
        elif header.kind == "attach":
            peer.loans.lends = self._share_memory and frames.read_body(header, parts) is True

    def _hello(self, peer: Peer, role: str | None, hello: Any) -> None:
        if not isinstance(hello, Hello) or not isinstance(hello.caller, Caller | None):
            raise FrameError(f"hello must be a Hello, got {type(hello).__name__}")
        refusal = self._refusal(role, hello.caller)
        if refusal:
            self._send(peer, "refused", refusal)
            return
        shared = (
            ProcessSharedMemory.shared(self._identity.uid if self._identity else "") if self._share_memory else None
        )
        readable = shared is not None and tokens.shares_memory(hello.memory)
        with self._lock:
            abandoned = peer.calls.keys() - set(hello.pending) if peer.welcome else set()
        for number in abandoned:  # given up by the client while the connection was lost
            self._cancel(peer, number)
        with self._lock:  # a request that ends meanwhile would be in neither table
            if not peer.welcome:
                peer.finished = self._forgotten.pop(peer.routing_id, peer.finished)
            answer = Welcome(
                caller=Caller.of(self._identity),
                instance=self._instance,
                memory=shared.token.proof if shared is not None else None,
                readable=readable,
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
        if role not in (None, SCRIPT_WORKERS) and caller is not None and caller.group != role:
            return f"the key is that of group {role}, the message says {caller.group}"
        if caller is not None and self._identity is not None and caller.uid != self._identity.uid:
            identity = self._identity
            return f"this is job {identity.job} ({identity.uid}), not {caller.job} ({caller.uid})"
        return ""

    def _call(self, peer: Peer, header: FrameHeader, parts: Sequence[Any]) -> None:
        number = header.request_id
        if type(number) is not int:
            raise FrameError("request id must be an integer")
        call = IncomingCall(peer, header, parts, answer=self._answer)
        with self._lock:
            if number in peer.calls or (number in peer.finished and not header.options.get("idempotent")):
                self.counters["duplicates"] += 1
                return
            peer.calls[number] = call
        self.counters["calls"] += 1
        handler = self._handlers.get(call.method)
        problem = self._problem(call, handler)
        if problem is not None or handler is None:
            call.fail(problem or AssertionError("bug: a missing handler is a problem"))
        elif getattr(handler, "rpc_inline", False):
            self._run_inline(call, handler)
        else:
            self._begin(call, handler)

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

    def _begin(self, call: IncomingCall, handler: Handler) -> None:
        call.begun, call.came = True, self._io.clock()
        self._confirm_later(call)
        if not getattr(handler, "rpc_scheduling", False):
            self._runner.submit(call, handler)
            return
        try:
            handler(call)
        except Exception as error:  # noqa: BLE001 - as above
            call.fail(error)

    def _confirm_later(self, call: IncomingCall) -> None:
        timeout = call.header.options.get("timeout")
        if isinstance(timeout, (int, float)) and timeout <= 2 * rpc_wire.RECEIPT_SECONDS:
            call.confirmed = True
            self._send(call.peer, "received", call.id)
            return
        if not self._confirming:
            self._confirming = True
            self._io.call_at(self._io.clock() + rpc_wire.RECEIPT_SECONDS, self._confirm)

    def _confirm(self) -> None:
        """Tell clients that calls were received which have run for RECEIPT_SECONDS, and schedule the next check for the others."""
        with self._dispatching, self._lock:
            latest_start = self._io.clock() - rpc_wire.RECEIPT_SECONDS
            running = [call for peer in self._peers.values() for call in peer.calls.values() if call.begun]
            calls = [call for call in running if not call.confirmed]
            self._confirming = any(call.came > latest_start for call in calls)
            for call in calls:
                if call.came <= latest_start:
                    call.confirmed = True
                    self._send(call.peer, "received", call.id)
            if self._confirming:
                self._io.call_at(self._io.clock() + rpc_wire.RECEIPT_SECONDS, self._confirm)

    def _cancel(self, peer: Peer, number: int) -> None:
        call = peer.calls.get(number)
        if call is None:
            if self._on_late_cancel is not None:
                self._on_late_cancel(peer, number)
            return
        call.cancelled = True
        if call.on_cancel is not None:
            call.on_cancel()

    def _answer(self, call: IncomingCall, kind: str, value: Any) -> bool:
        """Encode an answer on the thread of the handler, and send it; return whether `value` could be encoded."""
        is_encodable = True
        try:
            parts = self._encode(kind, value, call.id)
        except (TypeError, ValueError) as error:
            is_encodable, parts = False, self._encode("error", rpc_wire.pack_error(error), call.id)
        peer = call.peer
        with self._lock:
            if peer.calls.get(call.id) is call:  # else it was answered before, or its caller is gone
                del peer.calls[call.id]
                peer.finished[call.id] = None
                if len(peer.calls) < _BUSY_CALLS or not is_small(parts):
                    self._send_parts(peer, parts)
                else:
                    peer.outbox.append(parts)
                    if len(peer.outbox) == 1:
                        self._io.call_soon(self._send_outbox, peer)
                if len(peer.finished) > rpc_wire.REMEMBERED_IDS:
                    peer.finished.popitem(last=False)
        return is_encodable

    def _send_outbox(self, peer: Peer) -> None:
        with self._lock:
            answers, peer.outbox = peer.outbox, []
        for parts in batched(answers):
            self._send_parts(peer, parts)

    def _encode(self, kind: str, value: Any, request_id: int | None = None) -> list[Any]:
        return frames.encode_message(kind, value, epoch=self.epoch, request_id=request_id, sender=None)

    def _send(self, peer: Peer, kind: str, value: Any) -> bool:
        return self._send_parts(peer, self._encode(kind, value))

    def _send_parts(self, peer: Peer, parts: Sequence[Any]) -> bool:
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
            finally:
                # sending may consume the notification of a message that has arrived
                if not self._reading and sockets.has_message(self._socket):
                    self._reading = True
                    self._io.call_soon(self._receive_all)
            return True

    def _start_probe(self) -> None:
        if self._probe is None:
            self._probe = self._io.call_at(self._io.clock() + rpc_wire.PROBE_SECONDS, self._probe_peers)

    def _probe_peers(self) -> None:
        with self._dispatching:
            self._look_for_lost_peers()

    def _look_for_lost_peers(self) -> None:
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
        with self._lock:
            self._peers.pop(peer.routing_id, None)
            running = {call.id: None for call in peer.calls.values() if call.begun}
            answered = dict(list(peer.finished.items())[-_KEPT_IDS:])
            self._forgotten[peer.routing_id] = OrderedDict({**answered, **running})
            if len(self._forgotten) > _MAX_LOST_CLIENTS:
                self._forgotten.popitem(last=False)
            calls = list(peer.calls.values())
        for call in calls:
            self._cancel(peer, call.id)
        with self._lock:
            peer.calls.clear()
        if self._share_memory:
            peer.loans.lost()
        if self._on_peer_lost is not None:
            self._on_peer_lost(peer)


def _public_methods(target: object) -> dict[str, Handler]:
    names = (name for name in dir(type(target)) if not name.startswith("_"))
    return {name: getattr(target, name) for name in names if callable(getattr(type(target), name))}


def _host_of(frame: Any) -> str:
    """Return the IP address from which a message came, which ZeroMQ has read from the socket."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # a transport without addresses
        return ""


def _same_role(caller: Caller, role: str) -> bool:
    """Return whether a connection with the key of a role may identify itself as `caller`. A supervisor has the key of its pod's role."""
    return caller.role in (role, "supervisor")
