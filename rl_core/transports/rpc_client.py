"""The calling end of RPC: one DEALER socket on the I/O thread, usable from any thread and any event loop. See `rpc`.

A connection is WAITING (no handshake yet, or lost), GREETING (hello sent) or READY (welcome received). Calls leave only when
it is READY, within the credit; the others queue inside their timeout. After a reconnection the server tells which of the
calls in flight it knows: unknown ones are sent again, so a call is run at most once unless it is idempotent.
"""

import asyncio
import concurrent.futures
import enum
import itertools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rl_core.api.errors import ConfigError, DeadlineExceeded, EpochFenced, FrameError, InfrastructureError, WorkerLost
from rl_core.api.identity import Identity
from rl_core.transports import frames, rpc_wire, shared_memory, sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.frames import FrameHeader
from rl_core.transports.links import Link, SharedMemory
from rl_core.transports.sockets import IoThread

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 60.0
RECONNECT_SECONDS = 2.0
"""How long a lost connection may stay lost before calls that may have been received fail with WorkerLost."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _State(enum.Enum):
    """WAITING -> GREETING -> READY -> WAITING ...; CLOSED ends it."""

    WAITING = enum.auto()
    GREETING = enum.auto()
    READY = enum.auto()
    CLOSED = enum.auto()


class Answer:
    """What ended a call: an encoded reply still to be decoded, or an error."""

    __slots__ = ("_error", "_header", "_link", "_parts")

    def __init__(
        self,
        *,
        error: BaseException | None = None,
        header: FrameHeader | None = None,
        parts: list[Any] | None = None,
        link: Link | None = None,
    ) -> None:
        self._error, self._header, self._parts, self._link = error, header, parts, link

    def load(self) -> Any:
        """Decode and return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        if self._header is None or self._link is None:
            raise AssertionError("bug: an answer is an error or a message")
        return frames.read_body(self._header, self._parts or [], resolve=self._link.resolve)

    def discard(self) -> None:
        """Give back the memory of a reply that nobody wants."""
        if self._header is not None and self._link is not None:
            self._link.discard(self._header)


class _Call:
    """One request in flight. After creation only the I/O thread touches it, save `sink`, which it calls once (streams: often)."""

    __slots__ = (
        "abandoned",
        "deadline",
        "id",
        "idempotent",
        "late",
        "method",
        "nbytes",
        "parts",
        "received",
        "sent",
        "sink",
        "timeout",
    )

    def __init__(
        self,
        number: int,
        method: str,
        parts: list[Any],
        *,
        timeout: float,
        deadline: float,
        idempotent: bool,
        sink: Callable[[str, Answer], None],
    ) -> None:
        self.id, self.method, self.parts = number, method, parts
        self.timeout, self.deadline, self.idempotent, self.sink = timeout, deadline, idempotent, sink
        self.nbytes = sum(memoryview(part).nbytes for part in parts)
        self.sent = self.received = self.abandoned = False
        self.late: Callable[[Any], None] | None = None


class RpcClient:
    """Calls the server at `address` (`tcp://host:port`); connects in the background and again after a loss.

    `identity` None = anonymous, legal without keys only. `service` (needed with keys unless `address` is the identity's hub
    or channel) names whose key the server must have. Raises ConfigError when the address or keys do not fit.
    """

    def __init__(
        self,
        address: str,
        keys: KeyRing | None = None,
        identity: Identity | None = None,
        *,
        service: str | None = None,
        share_memory: bool = True,
        lend_arguments: bool = True,
        on_welcome: Callable[[bool], None] | None = None,
    ) -> None:
        sockets.check_reach(address, has_keys=keys is not None, verb="connect")
        if keys is not None and identity is None:
            raise ConfigError("a client with keys must have an identity, got None; pass Identity.from_env()")
        self.address = address
        self.epoch: int | None = identity.epoch if identity is not None else None
        self.counters: Counter[str] = Counter()
        """calls, late, fenced, resent, refused, malformed, shared_memory(_full)."""
        self._identity, self._keys = identity, keys
        self._service = service or _service_at(address, identity)
        if keys is not None and not self._service:
            raise ConfigError(f"the service at {address} must be named to know its key, got None; pass service=")
        self._share_memory, self._lend_arguments = share_memory, lend_arguments
        self._on_welcome = on_welcome
        self._io = IoThread.shared()
        self._ids = itertools.count(1)
        self._state = _State.WAITING
        self._server: dict[str, Any] | None = None
        self._instance: bytes | None = None
        self._refusal = ""
        self._lost_at: float | None = None
        self._link = Link(lambda released: self._send("release", released), self.counters)
        self._sent: dict[int, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._bytes = 0
        self._expiry: sockets.Timer | None = None
        self._expiry_at = float("inf")
        self._io.run(self._open)

    @property
    def shares_memory(self) -> bool:
        """Return whether server and client proved that they see the same /dev/shm."""
        return self._link.lends

    @property
    def peer(self) -> str:
        """Return the server's name, as far as known, and address."""
        return f"{rpc_wire.name_of(self._server)} at {self.address}" if self._server else self.address

    async def call(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what `method` returns. `timeout` None = 60 s. Cancellation cancels the handler.

        Raises the handler's error (its own type if public, else RemoteError), DeadlineExceeded, WorkerLost, EpochFenced;
        TypeError or ValueError when an argument cannot travel.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def deliver(answer: Answer) -> None:
            if future.done():
                answer.discard()
            else:
                future.set_result(answer)

        call = self._submit(
            method, args, kwargs, timeout, idempotent, lambda _, answer: _to_loop(loop, deliver, answer)
        )
        try:
            answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().discard()
            self._io.call_soon(self._abandon, call)
            raise
        return answer.load()

    def call_sync(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what `method` returns, blocking the thread. Raises as `call`, and RuntimeError on an event-loop thread."""
        rpc_wire.refuse_on_event_loop(f"call_sync({method!r})")
        answers: list[Answer] = []
        arrived = threading.Lock()
        arrived.acquire()

        def sink(_: str, answer: Answer) -> None:
            answers.append(answer)
            arrived.release()

        call = self._submit(method, args, kwargs, timeout, idempotent, sink)
        try:
            arrived.acquire()
        except BaseException:  # KeyboardInterrupt: nobody waits any more
            self._io.call_soon(self._abandon, call)
            raise
        return answers[0].load()

    def call_future(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> "concurrent.futures.Future[Any]":
        """Return a future of what `method` returns; cancelling it cancels the handler. Its callbacks run on the I/O thread."""
        return self.start_call(method, args, kwargs, timeout=timeout, idempotent=idempotent)

    def start_call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        convert: Callable[[Any], Any] = lambda value: value,
    ) -> "concurrent.futures.Future[Any]":
        """Return `call_future(method, *args, **kwargs)`, its value passed through `convert` on the I/O thread."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def sink(_: str, answer: Answer) -> None:
            if not future.set_running_or_notify_cancel():
                answer.discard()
                return
            try:
                future.set_result(convert(answer.load()))
            except Exception as error:
                future.set_exception(error)

        call = self._submit(method, args, kwargs, timeout, idempotent, sink)
        future.add_done_callback(lambda done: self._io.call_soon(self._abandon, call) if done.cancelled() else None)
        return future

    async def stream(
        self, method: str, /, *args: Any, timeout: float | None = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Yield what the generator `method` yields. `timeout` bounds each wait for the next item. Raises as `call`.

        Leaving the loop early cancels the handler.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[str, Answer]] = asyncio.Queue()
        call = self._submit(
            method,
            args,
            kwargs,
            timeout,
            False,
            lambda kind, answer: _to_loop(loop, arrived.put_nowait, (kind, answer)),
        )
        taken = 0
        try:
            while True:
                kind, answer = await arrived.get()
                if kind == "end":
                    call.abandoned = True  # it ended: nothing is left to cancel
                    return
                value = answer.load()
                taken += 1
                if taken % (rpc_wire.STREAM_WINDOW // 2) == 0:
                    self._io.call_soon(self._grant, call, rpc_wire.STREAM_WINDOW // 2)
                yield value
        finally:
            while not arrived.empty():
                arrived.get_nowait()[1].discard()
            self._io.call_soon(self._abandon, call)

    def borrow(self, placement: frames.Placement, nbytes: int) -> memoryview:
        """Return memory that the server lent by name; it is given back when the last array over it dies."""
        return self._link.resolve(placement, nbytes)

    def give_back(self, placement: frames.Placement) -> None:
        """Give back what the server lent by name and nobody borrowed."""
        self._link.give_back(placement)

    def set_epoch(self, epoch: int) -> None:
        """Send `epoch` from now on and refuse answers of older ones."""
        self.epoch = epoch

    def fail(self, reason: str) -> None:
        """Fail all calls under way with WorkerLost: the hub declared the server dead."""
        self._io.call_soon(self._fail_all, lambda call: WorkerLost(f"{call.method} at {self.peer}: {reason}"))

    def close(self) -> None:
        """Close the connection; calls under way fail with InfrastructureError."""
        self._io.run(self._shut)

    # --- any thread: start a call ---

    def _submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        idempotent: bool,
        sink: Callable[[str, Answer], None],
    ) -> _Call:
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout
        number = next(self._ids)
        options = {"timeout": seconds, "idempotent": idempotent} if idempotent else {"timeout": seconds}
        place = self._link.place if self._link.lends and self._lend_arguments else None
        parts = frames.encode_message(
            "call",
            [list(args), kwargs],
            epoch=self.epoch,
            request_id=number,
            sender=None,
            method=method,
            options=options,
            place=place,
        )
        call = _Call(
            number,
            method,
            parts,
            timeout=seconds,
            deadline=self._io.clock() + seconds,
            idempotent=idempotent,
            sink=sink,
        )
        self._io.call_soon(self._enqueue, call)
        return call

    # --- everything below runs on the I/O thread ---

    def _open(self) -> None:
        self._socket = self._io.context.socket(zmq.DEALER)
        sockets.configure(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(12))
        if self._keys is not None and self._service:
            self._keys.connect(self._socket, self._service)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._io.register(self._monitor, self._watch)
        self._io.register(self._socket, self._receive)
        self._socket.connect(self.address)

    def _shut(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._send("bye", None)
        self._state = _State.CLOSED
        self._fail_all(lambda call: InfrastructureError(f"{call.method} at {self.peer}: the client was closed"))
        if self._expiry is not None:
            self._expiry.cancel()
        self._io.unregister(self._monitor)
        self._io.unregister(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._link.lost()

    def _enqueue(self, call: _Call) -> None:
        self.counters["calls"] += 1
        if self._state is _State.CLOSED:
            self._finish(
                call, "error", Answer(error=InfrastructureError(f"{call.method} at {self.peer}: the client was closed"))
            )
            return
        self._queue.append(call)
        self._expect(call.deadline)
        self._flush()

    def _flush(self) -> None:
        while self._state is _State.READY and self._queue and len(self._sent) < rpc_wire.MAX_CALLS:
            call = self._queue[0]
            if self._sent and self._bytes + call.nbytes > rpc_wire.MAX_BYTES:
                return
            self._queue.popleft()
            self._sent[call.id] = call
            self._bytes += call.nbytes
            call.sent = True
            self._socket.send_multipart(call.parts, zmq.NOBLOCK, copy=False)

    def _send(self, kind: str, value: Any, request_id: int | None = None) -> None:
        if self._state in (_State.GREETING, _State.READY):
            parts = frames.encode_message(kind, value, epoch=self.epoch, request_id=request_id, sender=None)
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def _watch(self) -> bool:
        if self._state is _State.CLOSED or not self._monitor.poll(0):
            return False
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected()
        else:
            self._refuse("the server refused this process's key")
        return True

    def _refuse(self, why: str) -> None:
        self.counters["refused"] += 1
        if not self._refusal:
            logger.error("%s: %s", self.address, why)
        self._refusal = why

    def _greet(self) -> None:
        self._state, self._lost_at = _State.GREETING, None
        shared = SharedMemory.shared(self._identity.uid if self._identity else "") if self._share_memory else None
        hello = {
            "identity": rpc_wire.describe(self._identity),
            "token": shared.token.show() if shared is not None else None,
            "pending": list(self._sent),
        }
        self._send("hello", hello)

    def _disconnected(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.WAITING
        self._lost_at = self._io.clock()
        if any(not call.idempotent for call in self._sent.values()):
            self._io.call_at(self._lost_at + RECONNECT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._lost_at is None or self._io.clock() - self._lost_at < RECONNECT_SECONDS:
            return
        for call in [call for call in self._sent.values() if not call.idempotent]:
            self._finish(
                call, "error", Answer(error=self._lost(call, f"the connection was lost {RECONNECT_SECONDS} s ago"))
            )

    def _lost(self, call: _Call, why: str) -> WorkerLost:
        return WorkerLost(f"{call.method} at {self.peer}: {why}; whether it ran is unknown")

    def _welcome(self, welcome: dict[str, Any]) -> None:
        self._server, self._refusal = welcome["identity"], ""
        replaced = self._instance is not None and self._instance != welcome["instance"]
        self._instance = welcome["instance"]
        if replaced:
            self._link.lost()
        can_read = self._share_memory and shared_memory.readable(welcome["token"])
        self._link.lends = can_read and welcome["readable"] is True
        self._state = _State.READY
        self._send("attach", can_read)
        self._resume(set(welcome["running"]), set(welcome["finished"]), replaced)
        if self._on_welcome is not None:
            self._on_welcome(replaced)
        self._flush()

    def _resume(self, running: set[int], finished: set[int], replaced: bool) -> None:
        again = []
        for call in list(self._sent.values()):
            if call.id in running:
                continue
            if call.idempotent or not (replaced or call.id in finished):
                again.append(call)
            elif replaced:
                self._finish(call, "error", Answer(error=self._lost(call, "the server was replaced by another")))
            else:
                self._finish(call, "error", Answer(error=self._lost(call, "the answer was lost with the connection")))
        for call in again:
            del self._sent[call.id]
            self._bytes -= call.nbytes
            self.counters["resent"] += 1
        self._queue.extendleft(reversed(again))

    def _receive(self) -> bool:
        if self._state is _State.CLOSED:
            return False
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            self._dispatch(frames.read_header(parts[0].buffer), parts[1:])
        except (FrameError, KeyError, TypeError) as error:
            self.counters["malformed"] += 1
            logger.warning("dropped a malformed message from %s: %s", self.peer, error)
        return True

    def _dispatch(self, header: FrameHeader, parts: list[Any]) -> None:
        kind = header.kind
        if kind in ("reply", "error", "item", "end"):
            self._answered(header, parts)
        elif kind == "received":
            for number in frames.read_body(header, parts):
                if number in self._sent:
                    self._sent[number].received = True
        elif kind == "release":
            self._link.take_back(frames.read_body(header, parts))
        elif kind == "welcome":
            self._welcome(frames.read_body(header, parts))
        elif kind == "who":
            self._greet()
        elif kind == "refused":
            self._refuse(str(frames.read_body(header, parts)))

    def _answered(self, header: FrameHeader, parts: list[Any]) -> None:
        call = self._sent.get(header.request_id)
        answer = self._answer(header, parts, call.method if call is not None else "")
        if call is None:
            self.counters["late"] += 1
            answer.discard()
        elif header.kind == "item":
            call.deadline = self._io.clock() + call.timeout
            call.sink("item", answer)
        else:
            self._finish(call, header.kind, answer)
            self._flush()

    def _answer(self, header: FrameHeader, parts: list[Any], method: str) -> Answer:
        if header.epoch is not None and self.epoch is not None and header.epoch < self.epoch:
            self.counters["fenced"] += 1
            self._link.discard(header)
            return Answer(
                error=EpochFenced(
                    f"{method} was answered by {self.peer} from epoch {header.epoch}, this process is at epoch {self.epoch}"
                )
            )
        if header.kind == "error":
            return Answer(error=rpc_wire.rebuild_error(frames.read_body(header, parts), method=method, peer=self.peer))
        return Answer(header=header, parts=parts, link=self._link)

    def _finish(self, call: _Call, kind: str, answer: Answer) -> None:
        if self._sent.pop(call.id, None) is not None:
            self._bytes -= call.nbytes
        if call.abandoned:
            answer.discard()
        else:
            call.sink(kind, answer)

    def _fail_all(self, error: Callable[[_Call], BaseException]) -> None:
        calls = [*self._sent.values(), *self._queue]
        self._queue.clear()
        for call in calls:
            self._finish(call, "error", Answer(error=error(call)))

    def _abandon(self, call: _Call) -> None:
        if call.abandoned or self._state is _State.CLOSED:
            return
        call.abandoned = True
        if call.id in self._sent:
            self._send("cancel", None, call.id)
            del self._sent[call.id]
            self._bytes -= call.nbytes
            self._flush()
        elif call.sent:  # answered, but the answer came too late to be taken: the server may have to undo something
            self._send("cancel", None, call.id)
        else:
            self._queue = deque(other for other in self._queue if other is not call)
            self._link.retract(call.parts)

    def _grant(self, call: _Call, items: int) -> None:
        if call.id in self._sent:
            self._send("credit", items, call.id)

    def _expect(self, deadline: float) -> None:
        if deadline < self._expiry_at:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_at = deadline
            self._expiry = self._io.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._expiry, self._expiry_at = None, float("inf")
        now = self._io.clock()
        for call in [call for call in [*self._sent.values(), *self._queue] if call.deadline <= now]:
            error = DeadlineExceeded(
                f"{call.method} at {self.peer} was not answered within {call.timeout:g} s; {self._whereabouts(call)}"
            )
            self._abandon(call)
            call.sink("error", Answer(error=error))
        for call in [*self._sent.values(), *self._queue]:
            self._expect(call.deadline)

    def _whereabouts(self, call: _Call) -> str:
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


def _service_at(address: str, identity: Identity | None) -> str | None:
    if identity is None:
        return None
    return {identity.hub: "hub", identity.channel: "channel"}.get(address)


def _to_loop(loop: asyncio.AbstractEventLoop, deliver: Callable[[Any], None], value: Any) -> None:
    try:
        loop.call_soon_threadsafe(deliver, value)
    except RuntimeError:  # the loop was closed while the call was under way: nobody waits
        answer = value[1] if isinstance(value, tuple) else value
        answer.discard()
