"""One DEALER connection to a server: handshake, flow control by credit, resending and deadlines. Used by `rpc_client`; see `rpc`.

A connection is WAITING (no handshake yet, or lost), GREETING (hello sent) or READY (welcome received). Calls are sent only in READY and
within the credit; others wait in a queue, and their timeout runs. After a reconnection the server reports which of the pending calls it has
received, and the others are sent again. So a call runs at most once unless it is idempotent.

The thread that makes a call sends it. While several calls are in flight the I/O thread sends further ones, as many at once as have come.
The I/O thread watches the connection and the deadlines; it receives the replies and completes the calls, unless a thread that waits for a
call does so meanwhile. One lock guards the socket and the state; calls are completed outside it, because that runs callbacks of others.
"""

import contextlib
import enum
import functools
import itertools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rl_core.api.errors import DeadlineExceeded, EpochFenced, FrameError, InfrastructureError, WorkerLost
from rl_core.api.identity import Identity
from rl_core.messages.rpc import Caller, Hello, Welcome
from rl_core.transports import frames, rpc_wire, sockets, tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.frames import FrameHeader
from rl_core.transports.interrupts import Interrupts
from rl_core.transports.links import ClientLoans, ProcessSharedMemory
from rl_core.transports.message_batches import batched, unbatched
from rl_core.transports.pending_calls import PendingCalls
from rl_core.transports.rpc_call import CallFuture, ClientClosed
from rl_core.transports.sockets import IoThread
from rl_core.transports.waiting_reader import WaitingReader

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 2.0
"""How long a lost connection may stay lost before calls that may have been received fail with WorkerLost."""
BUSY_CALLS = 2
"""If this many calls are in flight, the I/O thread sends further ones."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _State(enum.Enum):
    """WAITING -> GREETING -> READY -> WAITING ...; CLOSED ends it."""

    WAITING = enum.auto()
    GREETING = enum.auto()
    READY = enum.auto()
    CLOSED = enum.auto()


class Connection:
    """A connection to one server; see the module. The arguments are those of `RpcClient`."""

    def __init__(
        self,
        address: str,
        *,
        identity: Identity | None,
        keys: KeyRing | None,
        service: str | None,
        share_memory: bool,
    ) -> None:
        self.address = address
        self.epoch: int | None = identity.epoch if identity is not None else None
        self.counters: Counter[str] = Counter()
        self.loans = ClientLoans(lambda released: self._send("release", released))
        self.shares_memory = False
        """Whether server and client proved that they see the same /dev/shm."""
        self._identity, self._share_memory = identity, share_memory
        self._io = IoThread.shared()
        self._lock = threading.RLock()
        """Guards the socket and all fields below."""
        self._inbox: deque[CallFuture] = deque()
        """Calls that the I/O thread is to send. Appended to without the lock, so that their callers do not wait for a send."""
        self._inbox_announced = False
        """Whether the I/O thread is to look at the inbox."""
        self._abandoned: deque[CallFuture] = deque()
        """Cancelled calls, which take effect before the next call is sent. Appended to without the lock, as finalizers may cancel."""
        self._failed: list[tuple[CallFuture, Exception]] = []
        """Calls that fail as soon as the lock is free."""
        self._reading = False
        """Whether a thread is reading, until it finds the socket empty."""
        self._reading_thread: int | None = None
        """Id of the thread that receives and handles messages at present; None if none does. Only one may, so that messages keep their order."""
        self._state = _State.WAITING
        self._server: Caller | None = None
        self._instance: bytes | None = None
        """Id of the server process. If it changes, another process has taken the address."""
        self._refusal = ""
        """Why the server has refused this client; an empty string if it has not."""
        self._loss = ""
        """Why the server was declared lost; an empty string if it was not."""
        self._lost_at: float | None = None
        self._calls = PendingCalls()
        self._expiry: sockets.Timer | None = None
        self._expiry_at = float("inf")
        self._keys_tried = 0
        with Interrupts.deferred(), self._lock:
            self._open(keys, service)

    @property
    def peer(self) -> str:
        """Return the server's name, as far as known, and address."""
        return f"{rpc_wire.name_of(self._server)} at {self.address}" if self._server else self.address

    @property
    def idle(self) -> bool:
        """Return whether no call is queued or waits for its answer."""
        with self._lock:
            return not self._inbox and not any(self._calls)

    # --- methods for rpc_client; on any thread ---

    def submit(self, call: CallFuture) -> None:
        """Send `call`, or queue it until the connection and its credit allow."""
        with Interrupts.deferred():
            self._inbox.append(call)
            if self._calls.credit_calls < BUSY_CALLS or call.waits:
                self._send_inbox()
            elif not self._inbox_announced:
                self._inbox_announced = True
                self._io.call_soon(self._send_inbox)

    def read_until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Receive replies on this thread until `done()` is true or `seconds` have passed (None: no limit); see `WaitingReader`.

        Returns False at once when another thread reads, and when several calls are in flight: the I/O thread, which is not part of their
        exchange, then receives more of their replies at a time.
        """
        return self._calls.credit_calls <= 1 and self._reader.read_until(done, seconds)

    def wake_reader(self) -> None:
        """Let the thread in `read_until` look at its condition again."""
        self._reader.wake()

    def abandon(self, call: CallFuture) -> None:
        """Give up `call`. The server is asked to cancel it or, if it has replied already, to undo its effect."""
        self._abandoned.append(call)
        self._io.call_soon(self._drop_abandoned)

    def fail(self, reason: str) -> None:
        """Close the socket without waiting for it. Calls under way and later ones fail with WorkerLost."""
        self._io.call_soon(self._shut, reason)

    def close(self) -> None:
        """Close the socket; calls under way fail."""
        self._io.run(self._shut)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock, then complete the calls that failed meanwhile."""
        failed: list[tuple[CallFuture, Exception]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    failed, self._failed = self._failed, failed
        finally:
            for call, error in failed:
                call.fail(error)

    def _open(self, keys: KeyRing | None, service: str | None) -> None:
        """Open the socket, on the thread of the caller: watchers of the hub connect too, and must not wait for the I/O thread."""
        self._socket = self._io.context.socket(zmq.DEALER)
        sockets.configure(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(12))
        self._keys, self._services = keys, deque([service] if service or keys is None else keys.services())
        if keys is not None:
            keys.connect(self._socket, self._services[0] or "")
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._io.register(self._monitor, self._watch)
        self._io.register(self._socket, self._read_all)
        self._reader = WaitingReader(
            self._io, self._socket, self._read_all, closed=lambda: self._state is _State.CLOSED, lock=self._lock
        )
        self._socket.connect(self.address)

    # --- below: on the I/O thread ---

    def _shut(self, reason: str = "") -> None:
        with self._exclusive():
            if self._state is _State.CLOSED:
                return
            self._send("bye", None)
            self._loss = reason
            self._state = _State.CLOSED
            self._failed += [(call, self._closed(call)) for call in self._calls.clear()]
            if self._expiry is not None:
                self._expiry.cancel()
            self._io.unregister(self._monitor)
            self._io.unregister(self._socket)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()

    def _closed(self, call: CallFuture) -> InfrastructureError:
        error = WorkerLost if self._loss else ClientClosed
        return error(f"{call.method} at {self.peer}: {self._loss or 'the client was closed'}")

    # --- sending ---

    def _send_inbox(self) -> None:
        """Queue the calls in the inbox, and send what the credit allows."""
        with self._exclusive():
            self._inbox_announced = False  # before the look at the inbox: whoever appends later announces it again
            if self._abandoned:
                self._drop_abandoned()
            while self._inbox:
                self._enqueue(self._inbox.popleft())
            self._flush()

    def _enqueue(self, call: CallFuture) -> None:
        self.counters["calls"] += 1
        if self._state is _State.CLOSED:
            self._failed.append((call, self._closed(call)))
            return
        # A long poll goes at once: it may do what calls short of credit wait for.
        at_head = call.waits and self._state is _State.READY
        (self._calls.queue.appendleft if at_head else self._calls.queue.append)(call)
        self._expect(call.deadline)

    def _drop_abandoned(self) -> None:
        with self._lock:
            while self._inbox:  # a call is abandoned after it was queued
                self._enqueue(self._inbox.popleft())
            while self._abandoned:
                self._abandon(self._abandoned.popleft())

    def _abandon(self, call: CallFuture) -> None:
        if call.sent:  # also when it was answered: nobody received the answer, and the server may undo its effect
            call.sent = False
            self._calls.end(call)
            self._send("cancel", None, call.id)
            self._flush()
        elif call in self._calls.queue:
            self._calls.queue.remove(call)

    def _send(self, kind: str, value: Any, request_id: int | None = None) -> None:
        """Send a message that has no answer; dropped while there is no connection."""
        with self._lock:
            if self._state in (_State.GREETING, _State.READY):
                self._send_parts(frames.encode_message(kind, value, epoch=self.epoch, request_id=request_id))

    def _send_parts(self, parts: Sequence[Any]) -> None:
        sockets.send(self._socket, parts)
        # sending may consume the notification of a message that has arrived
        if not self._reading and sockets.has_message(self._socket):
            self._reading = True
            self._io.call_soon(self._read_all)

    def _flush(self) -> None:
        """Send the queued calls that the connection and its credit allow."""
        if self._state is _State.READY and self._calls.queue:
            for parts in batched([call.parts for call in self._calls.begin()]):
                self._send_parts(parts)

    # --- reading ---

    def _read_all(self) -> None:
        """Handle what has arrived. Returns at once while another thread does so: it ends only when it finds the socket empty."""
        thread = threading.get_ident()
        for number in itertools.count():
            with self._lock:
                if self._reading_thread not in (None, thread):
                    return
                second = number == 1  # often there is none
                parts = None if self._state is _State.CLOSED else sockets.receive(self._socket, look=second)
                self._reading = parts is not None
                self._reading_thread = thread if self._reading else None
            if parts is None:
                return
            try:
                self._read(parts)
            except BaseException:  # SystemExit of a callback, or what a handler of another signal than SIGINT raises: the I/O thread goes on
                self._reading_thread = None
                self._io.call_soon(self._read_all)
                raise

    def _read(self, parts: Sequence[Any]) -> None:
        """Handle one received message, or all messages of a batch.

        Replies free credit, so queued calls are sent first. Then the answered calls are completed, which runs the callbacks of their callers.
        """
        answered: deque[tuple[CallFuture, FrameHeader, Sequence[Any]]] = deque()
        for message in unbatched(parts):
            try:
                header = frames.read_header(message[0])
                if header.kind not in ("reply", "error"):
                    self._dispatch(header, message[1:])
                elif (call := self._answered(header)) is not None:
                    answered.append((call, header, message[1:]))
            except Exception as error:  # noqa: BLE001 - whatever the server sends: the messages after it must be read
                self._drop(error)
        if self._calls.queue:
            with self._lock:
                self._flush()
        self._complete(answered)

    def _drop(self, error: Exception) -> None:
        """Count and log a malformed message."""
        self.counters["malformed"] += 1
        trace = None if isinstance(error, FrameError) else error
        logger.warning("dropped a malformed message from %s: %r", self.peer, error, exc_info=trace)

    def _complete(self, answered: "deque[tuple[CallFuture, FrameHeader, Sequence[Any]]]") -> None:
        while answered:
            call, header, parts = answered.popleft()
            try:
                call.settle(functools.partial(self._value, header, parts, call.method))
            except BaseException:  # SystemExit of a callback: the other calls are answered all the same
                self._io.call_soon(self._complete, answered)
                raise

    def _dispatch(self, header: FrameHeader, parts: Sequence[Any]) -> None:
        kind = header.kind
        if kind == "received":
            number = frames.read_body(header, parts)
            with self._lock:
                if (call := self._calls.in_flight.get(number)) is not None:
                    call.received = True
        elif kind == "welcome":
            self._welcome(frames.read_body(header, parts))
        elif kind == "who":
            with self._lock:
                self._greet()
        elif kind == "refused":
            self._refuse(str(frames.read_body(header, parts)))

    def _answered(self, header: FrameHeader) -> CallFuture | None:
        """Return the call that a message answers, and free its credit; None if nobody waits for it."""
        with self._lock:
            call = self._calls.in_flight.get(header.request_id)
            if call is None:
                self.counters["late"] += 1
                # the server undoes the effect of an answer that nobody received
                self._send("cancel", None, header.request_id)
            else:
                self._calls.end(call)
            return call

    def _value(self, header: FrameHeader, parts: Sequence[Any], method: str) -> Any:
        if header.epoch is not None and self.epoch is not None and header.epoch < self.epoch:
            self.counters["fenced"] += 1
            raise EpochFenced(
                f"{method} was answered by {self.peer} from epoch {header.epoch}, this process is at epoch {self.epoch}"
            )
        value = frames.read_body(header, parts)
        if header.kind == "error":
            raise rpc_wire.rebuild_error(value, method=method, peer=self.peer)
        return value

    # --- connecting, losing ---

    def _watch(self) -> None:
        while self._state is not _State.CLOSED and sockets.has_message(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            with self._lock:
                self._follow(event)

    def _follow(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._services = deque([self._services[0]])
            self._greet()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # not its key, or the server went away
            self._try_another_key()
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected()
        else:
            self._refuse("the server refused this process's key")

    def _try_another_key(self) -> None:
        """Connect anew with the key of the next service that the server may be; slower after each round."""
        self._keys_tried += 1
        if self._keys_tried >= len(self._services):
            self._refusal = f"the server did not prove the key of {' or '.join(sorted(map(str, self._services)))}"
        if len(self._services) == 1:
            return
        self._services.rotate(-1)
        self._socket.disconnect(self.address)
        pause = min(0.02 * 2 ** (self._keys_tried // len(self._services)), sockets.RECONNECT_MS[1] / 1000)
        self._io.call_at(self._io.clock() + pause, self._connect)

    def _connect(self) -> None:
        with self._lock:
            if self._state is not _State.CLOSED and self._keys is not None:
                self._keys.connect(self._socket, self._services[0] or "")
                self._socket.connect(self.address)

    def _refuse(self, why: str) -> None:
        self.counters["refused"] += 1
        if not self._refusal:
            logger.error("%s: %s", self.address, why)
        self._refusal = why

    def _greet(self) -> None:
        self._state, self._lost_at = _State.GREETING, None
        shared = (
            ProcessSharedMemory.shared(self._identity.uid if self._identity else "") if self._share_memory else None
        )
        hello = Hello(
            caller=Caller.of(self._identity),
            memory=shared.token.proof if shared is not None else None,
            pending=tuple(self._calls.in_flight),
        )
        self._send("hello", hello)

    def _welcome(self, welcome: Welcome) -> None:
        can_read = self._share_memory and tokens.shares_memory(welcome.memory)
        with self._exclusive():
            self._server, self._refusal = welcome.caller, ""
            replaced = self._instance is not None and self._instance != welcome.instance
            self._instance = welcome.instance
            self.shares_memory = can_read and welcome.readable is True
            self._state = _State.READY
            self._send("attach", can_read)
            self._resume(set(welcome.running), set(welcome.finished), replaced)
            self._flush()

    def _resume(self, running: set[int], finished: set[int], replaced: bool) -> None:
        """After a reconnection, leave the calls that still run, send those again that never arrived or are idempotent, and fail the others."""
        resent = []
        for call in list(self._calls.in_flight.values()):
            if call.id in running:
                continue
            if call.idempotent or not (replaced or call.id in finished):
                resent.append(call)
                continue
            self._calls.end(call)
            if not replaced:
                self._send("cancel", None, call.id)
            reason = "the server was replaced by another" if replaced else "the answer was lost with the connection"
            self._failed.append((call, self._lost(call, reason)))
        self.counters["resent"] += len(resent)
        self._calls.return_to_queue(resent)

    def _disconnected(self) -> None:
        if self._state is _State.WAITING:  # lost before, or never there: what may have been received was lost then
            return
        self._state = _State.WAITING
        self._lost_at = self._io.clock()
        if any(not call.idempotent for call in self._calls.in_flight.values()):
            self._io.call_at(self._lost_at + RECONNECT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        with self._exclusive():
            if self._lost_at is None or self._io.clock() - self._lost_at < RECONNECT_SECONDS:
                return
            for call in [call for call in self._calls.in_flight.values() if not call.idempotent]:
                self._calls.end(call)
                self._failed.append((call, self._lost(call, f"the connection was lost {RECONNECT_SECONDS:g} s ago")))

    def _lost(self, call: CallFuture, why: str) -> WorkerLost:
        return WorkerLost(f"{call.method} at {self.peer}: {why}; whether it ran is unknown")

    # --- deadlines ---

    def _expect(self, deadline: float) -> None:
        if deadline < self._expiry_at:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_at = deadline
            self._expiry = self._io.call_at(deadline, self._expire)

    def _expire(self) -> None:
        with self._exclusive():
            self._expiry, self._expiry_at = None, float("inf")
            now = self._io.clock()
            for call in [call for call in self._calls if call.deadline <= now]:
                message = f"{call.method} at {self.peer} was not answered within {call.timeout:g} s; {self._whereabouts(call)}"
                self._abandon(call)
                self._failed.append((call, DeadlineExceeded(message)))
            for call in self._calls:
                self._expect(call.deadline)

    def _whereabouts(self, call: CallFuture) -> str:
        if call.received:
            return "the server received it and is still working on it"
        if call.sent and self._state is _State.READY:
            return "it was sent, the server has not confirmed it"
        if self._refusal:
            return f"it was not sent: {self._refusal}"
        if self._lost_at is not None:
            return f"the connection was lost {self._io.clock() - self._lost_at:.1f} s ago"
        if self._state is _State.READY:
            return f"it was not sent: {len(self._calls.in_flight)} other calls are in flight"
        return "it was not sent: the server never answered a connection"
