"""One DEALER connection to a server: greeting, credit, resending, deadlines. The engine of `rpc_client`; see `rpc`.

A connection is WAITING (no handshake yet, or lost), GREETING (hello sent) or READY (welcome received). Calls leave only when
it is READY, within the credit; the others queue inside their timeout. After a reconnection the server tells which of the
calls in flight it knows: unknown ones are sent again, so a call is run at most once unless it is idempotent.

The lock guards the socket and all state. Whoever starts a call sends it itself. Answers are read by the I/O thread, or,
to save two changes of threads, by a thread that waits for its own call (`drive`): it is the leader until that call ends.
"""

import enum
import logging
import os
import select
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rl_core.api.errors import DeadlineExceeded, EpochFenced, FrameError, InfrastructureError, WorkerLost
from rl_core.api.identity import Identity
from rl_core.messages.rpc import Caller, Hello, Welcome
from rl_core.transports import frames, rpc_wire, shared_memory, sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.frames import FrameHeader
from rl_core.transports.links import Link, SharedMemory
from rl_core.transports.rpc_call import Answer, Call
from rl_core.transports.sockets import IoThread

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 2.0
"""How long a lost connection may stay lost before calls that may have been received fail with WorkerLost."""
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
    """See the module. `on_welcome(known)` runs on the I/O thread after each greeting; not known = the server
    has nothing of this connection (any more)."""

    def __init__(
        self,
        address: str,
        *,
        identity: Identity | None,
        keys: KeyRing | None,
        service: str | None,
        share_memory: bool,
        on_welcome: Callable[[bool], None] | None,
    ) -> None:
        self.address = address
        self.epoch: int | None = identity.epoch if identity is not None else None
        self.counters: Counter[str] = Counter()
        self.link = Link(self._release, self.counters)
        self._identity, self._share_memory, self._on_welcome = identity, share_memory, on_welcome
        self._io = IoThread.shared()
        self._lock = threading.RLock()
        self._state = _State.WAITING
        self._server: Caller | None = None
        self._instance: bytes | None = None
        self._refusal = ""
        self._lost_at: float | None = None
        self._sent: dict[int, Call] = {}
        self._queue: deque[Call] = deque()
        self._bytes = 0
        self._expiry: sockets.Timer | None = None
        self._expiry_at = float("inf")
        self._leader: Call | None = None
        self._reading = False
        self._keys_tried = 0
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._io.run(lambda: self._open(keys, service))

    @property
    def peer(self) -> str:
        """Return the server's name, as far as known, and address."""
        return f"{rpc_wire.name_of(self._server)} at {self.address}" if self._server else self.address

    # --- faces for rpc_client; any thread ---

    def submit(self, call: Call) -> None:
        """Send `call`, or queue it until the connection and its credit allow."""
        with self._lock:
            self.counters["calls"] += 1
            if self._state is _State.CLOSED:
                self._finish(call, "error", Answer(error=self._closed(call)))
                return
            self._queue.append(call)
            self._expect(call.deadline)
            self._flush()
            self._read_if_swallowed()

    def drive(self, call: Call, timeout: float | None) -> None:
        """Read answers on this thread until `call` ended or `timeout` passed, if no other thread leads; else wait for it."""
        with self._lock:
            if call.ended or call.driver is not None:
                return
            call.driver = threading.get_ident()
            leads = self._leader is None and self._state is not _State.CLOSED
            if leads:
                self._leader = call
                self._io.mute(self._descriptor, True)
            else:
                call.woken = threading.Lock()
                call.woken.acquire()
        try:
            if leads:
                self._lead(call, None if timeout is None else self._io.clock() + timeout)
            elif call.woken is not None:
                call.woken.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                call.driver = None
                if leads:
                    self._leader = None
                    if self._state is not _State.CLOSED:  # news since the last read is still told by the descriptor
                        self._io.mute(self._descriptor, False)
            call.settle()

    def abandon(self, call: Call) -> None:
        """Forget `call`; the server is told to cancel it, or to undo what an answer nobody took has done."""
        with self._lock:
            if call.abandoned or self._state is _State.CLOSED:
                return
            call.abandoned = True
            if self._sent.pop(call.id, None) is not None:
                self._bytes -= call.nbytes
                self._flush()
                self.send("cancel", None, call.id)
            elif call.sent:
                self.send("cancel", None, call.id)
            else:
                self._queue = deque(other for other in self._queue if other is not call)
                self.link.retract(call.parts)

    def time(self, call: Call, waits: bool) -> None:
        """Let the deadline of a stream begin now, as its reader waits for an item, or rest while the reader works."""
        with self._lock:
            call.deadline = self._io.clock() + call.timeout if waits else float("inf")
            self._expect(call.deadline)

    def grant(self, call: Call, items: int) -> None:
        """Let the server send `items` more of a stream."""
        with self._lock:
            if call.id in self._sent:
                self.send("credit", items, call.id)

    def send(self, kind: str, value: Any, request_id: int | None = None) -> None:
        """Send a message that has no answer; dropped while there is no connection."""
        with self._lock:
            if self._state in (_State.GREETING, _State.READY):
                parts = frames.encode_message(kind, value, epoch=self.epoch, request_id=request_id, sender=None)
                sockets.send(self._socket, parts)
                self._read_if_swallowed()

    def fail(self, reason: str) -> None:
        """Fail all calls under way with WorkerLost."""
        with self._lock:
            self._fail_all(lambda call: WorkerLost(f"{call.method} at {self.peer}: {reason}"))

    def close(self) -> None:
        """Close the socket; calls under way fail."""
        self._io.run(self._shut)

    # --- below: under the lock ---

    def _open(self, keys: KeyRing | None, service: str | None) -> None:
        self._socket = self._io.context.socket(zmq.DEALER)
        sockets.configure(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(12))
        self._keys, self._services = keys, deque([service] if service or keys is None else keys.services())
        if keys is not None:
            keys.connect(self._socket, self._services[0] or "")
        self._descriptor = sockets.descriptor(self._socket)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._nudge, select.POLLIN)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._io.register(self._monitor, self._watch)
        self._io.register(self._socket, self._on_readable)
        self._socket.connect(self.address)

    def _shut(self) -> None:
        with self._lock:
            if self._state is _State.CLOSED:
                return
            self.send("bye", None)
            self._state = _State.CLOSED
            self._fail_all(lambda call: self._closed(call))
            if self._expiry is not None:
                self._expiry.cancel()
            self._io.unregister(self._monitor)
            self._io.unregister(self._socket)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            self.link.lost()

    def _closed(self, call: Call) -> InfrastructureError:
        return InfrastructureError(f"{call.method} at {self.peer}: the client was closed")

    def _release(self, released: list[list[Any]]) -> None:
        self.send("release", released)

    def _flush(self) -> None:
        while self._state is _State.READY and self._queue and self._has_credit(self._queue[0]):
            call = self._queue.popleft()
            self._sent[call.id] = call
            self._bytes += call.nbytes
            call.sent = True
            sockets.send(self._socket, call.parts)

    def _has_credit(self, call: Call) -> bool:
        if call.waits or self._bytes == 0:  # nothing that takes credit is in flight
            return True
        full = len(self._sent) >= rpc_wire.MAX_CALLS
        if full and sum(not other.waits for other in self._sent.values()) >= rpc_wire.MAX_CALLS:
            return False
        return self._bytes + call.nbytes <= rpc_wire.MAX_BYTES

    # --- reading ---

    def _lead(self, call: Call, until: float | None) -> None:
        """Wait and read until `call` ended. `submit` has read before; what came since is told by the descriptor."""
        while not call.ended:
            left = None if until is None else until - self._io.clock()
            if left is not None and left <= 0:
                return
            for descriptor, _ in self._poll.poll(None if left is None else min(left, sockets.LONGEST_SLEEP) * 1000 + 1):
                if descriptor == self._nudge:
                    os.eventfd_read(self._nudge)
            with self._lock:
                self._read_all()

    def _on_readable(self) -> None:
        with self._lock:
            self._read_all()

    def _read_if_swallowed(self) -> None:
        """After a send: read what came meanwhile, unless this is called from reading."""
        if not self._reading:
            self._read_all()

    def _read_all(self) -> None:
        self._reading = True
        try:
            while self._state is not _State.CLOSED and sockets.readable(self._socket):
                self._read(sockets.receive(self._socket))
        finally:
            self._reading = False

    def _read(self, parts: list[Any]) -> None:
        try:
            self._dispatch(frames.read_header(parts[0].buffer), parts[1:])
        except Exception as error:  # whatever the server sends: the messages after it must be read
            self.counters["malformed"] += 1
            known = isinstance(error, FrameError)
            logger.warning("dropped a malformed message from %s: %r", self.peer, error, exc_info=not known)

    def _dispatch(self, header: FrameHeader, parts: list[Any]) -> None:
        kind = header.kind
        if kind in ("reply", "error", "item", "end"):
            self._answered(header, parts)
        elif kind == "received":
            for number in frames.read_body(header, parts):
                if number in self._sent:
                    self._sent[number].received = True
        elif kind == "release":
            self.link.take_back(frames.read_body(header, parts))
        elif kind == "welcome":
            self._welcome(frames.read_body(header, parts))
        elif kind == "who":
            self._greet()
        elif kind == "refused":
            self._refuse(str(frames.read_body(header, parts)))

    def _answered(self, header: FrameHeader, parts: list[Any]) -> None:
        call = self._sent.get(header.request_id)
        if call is None:
            self.counters["late"] += 1
            self.link.discard(header)
            if header.kind in ("reply", "error"):
                self.send("cancel", None, header.request_id)  # the server undoes what nobody took
            return
        answer = self._answer(header, parts, call.method)
        if header.kind == "item":
            call.sink("item", answer)
        else:
            self._finish(call, header.kind, answer)
            self._flush()

    def _answer(self, header: FrameHeader, parts: list[Any], method: str) -> Answer:
        if header.epoch is not None and self.epoch is not None and header.epoch < self.epoch:
            self.counters["fenced"] += 1
            self.link.discard(header)
            why = (
                f"{method} was answered by {self.peer} from epoch {header.epoch}, this process is at epoch {self.epoch}"
            )
            return Answer(error=EpochFenced(why))
        if header.kind == "error":
            return Answer(error=rpc_wire.rebuild_error(frames.read_body(header, parts), method=method, peer=self.peer))
        return Answer(header=header, parts=parts, link=self.link)

    def _finish(self, call: Call, kind: str, answer: Answer) -> None:
        """End `call`: its driver settles it; else its sink runs here (asyncio) or on the I/O thread (futures)."""
        if self._sent.pop(call.id, None) is not None:
            self._bytes -= call.nbytes
        if call.abandoned:
            answer.discard()
            return
        call.ended = True
        if call.driver is not None:
            call.outcome = (kind, answer)
            if call is not self._leader:
                if call.woken is not None:
                    call.woken.release()
            elif call.driver != threading.get_ident():
                os.eventfd_write(self._nudge, 1)
        elif call.inplace:
            call.end(kind, answer)
        else:
            self._io.call_soon(call.end, kind, answer)

    # --- connecting, losing ---

    def _watch(self) -> None:
        with self._lock:
            while self._state is not _State.CLOSED and sockets.readable(self._monitor):
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
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
        shared = SharedMemory.shared(self._identity.uid if self._identity else "") if self._share_memory else None
        hello = Hello(
            caller=Caller.of(self._identity),
            memory=shared.token.proof if shared is not None else None,
            pending=tuple(self._sent),
        )
        self.send("hello", hello)

    def _welcome(self, welcome: Welcome) -> None:
        self._server, self._refusal = welcome.caller, ""
        replaced = self._instance is not None and self._instance != welcome.instance
        self._instance = welcome.instance
        if not welcome.known:
            self.link.lost()
        can_read = self._share_memory and shared_memory.readable(welcome.memory)
        self.link.lends = can_read and welcome.readable is True
        self._state = _State.READY
        self.send("attach", can_read)
        self._resume(set(welcome.running), set(welcome.finished), replaced)
        if self._on_welcome is not None:
            self._io.call_soon(self._on_welcome, welcome.known is True)
        self._flush()

    def _resume(self, running: set[int], finished: set[int], replaced: bool) -> None:
        again = []
        for call in list(self._sent.values()):
            if call.id in running:
                continue
            if call.idempotent or not (replaced or call.id in finished):
                again.append(call)
            elif replaced:
                self._finish(call, "error", self._lost(call, "the server was replaced by another"))
            else:
                self.send("cancel", None, call.id)
                self._finish(call, "error", self._lost(call, "the answer was lost with the connection"))
        for call in again:
            del self._sent[call.id]
            self._bytes -= call.nbytes
            self.counters["resent"] += 1
        self._queue.extendleft(reversed(again))

    def _disconnected(self) -> None:
        if self._state is _State.WAITING:  # lost before, or never there: what may have been received was lost then
            return
        self._state = _State.WAITING
        self._lost_at = self._io.clock()
        if any(not call.idempotent for call in self._sent.values()):
            self._io.call_at(self._lost_at + RECONNECT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        with self._lock:
            if self._lost_at is None or self._io.clock() - self._lost_at < RECONNECT_SECONDS:
                return
            for call in [call for call in self._sent.values() if not call.idempotent]:
                self._finish(call, "error", self._lost(call, f"the connection was lost {RECONNECT_SECONDS:g} s ago"))

    def _lost(self, call: Call, why: str) -> Answer:
        return Answer(error=WorkerLost(f"{call.method} at {self.peer}: {why}; whether it ran is unknown"))

    def _fail_all(self, error: Callable[[Call], BaseException]) -> None:
        calls = [*self._sent.values(), *self._queue]
        self._queue.clear()
        for call in calls:
            self._finish(call, "error", Answer(error=error(call)))

    # --- deadlines ---

    def _expect(self, deadline: float) -> None:
        if deadline < self._expiry_at:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_at = deadline
            self._expiry = self._io.call_at(deadline, self._expire)

    def _expire(self) -> None:
        with self._lock:
            self._expiry, self._expiry_at = None, float("inf")
            now = self._io.clock()
            for call in [call for call in [*self._sent.values(), *self._queue] if call.deadline <= now]:
                late = f"{call.method} at {self.peer} was not answered within {call.timeout:g} s; {self._whereabouts(call)}"
                self.abandon(call)
                call.abandoned = False
                self._finish(call, "error", Answer(error=DeadlineExceeded(late)))
                call.abandoned = True
            for call in [*self._sent.values(), *self._queue]:
                self._expect(call.deadline)

    def _whereabouts(self, call: Call) -> str:
        if call.received:
            return "the server received it and is still working on it"
        if call.sent and self._state is _State.READY:
            return "it was sent, the server has not confirmed it"
        if self._refusal:
            return f"it was not sent: {self._refusal}"
        if self._lost_at is not None:
            return f"the connection was lost {self._io.clock() - self._lost_at:.1f} s ago"
        if self._state is _State.READY:
            return f"it was not sent: {len(self._sent)} other calls are in flight"
        return "it was not sent: the server never answered a connection"
