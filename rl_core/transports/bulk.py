"""Bulk streams: they carry large buffers from one process to another over ZeroMQ, authenticated but by default not encrypted.

    sender = BulkSender("tcp://127.0.0.1:0")
    ticket = sender.offer([array1, array2])          # a record: hand it out over RPC, whose connection proved who asks
    for chunk in BulkReceiver(ticket): ...           # uint8 memoryviews of at most 1 MiB, in order

A ticket is valid for one stream. Each chunk carries a BLAKE3 message authentication code over its number and bytes, keyed with the ticket's
session key, so a chunk that is forged, reordered, repeated or missing is detected. The receiver grants credit for WINDOW chunks in flight;
a dead receiver does not slow down the other streams. The sender runs on a thread of its own, the receiver on the thread of its caller. With
`keys` on both ends the stream is also encrypted (CURVE), at a tenth of the speed. Streams of the same buffers may use one `SharedTags`, so that
each chunk is hashed once for all of them.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import zmq
from blake3 import blake3

from rl_core.api.errors import DeadlineExceeded, FrameError, InfrastructureError
from rl_core.messages.weights import BulkTicket
from rl_core.transports import sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.sockets import IoThread

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
WINDOW = 16
"""Chunks in flight per stream."""
_CREDIT_STEP = 4
"""Chunks per credit message."""
TAG_BYTES = 32
TICKET_SECONDS = 60.0
"""Seconds after which an unused ticket, or a stream that requests no chunk, ends."""
SWEEP_SECONDS = 1.0
"""Seconds between two searches for such tickets and streams."""
LAST_LOOK_MS = 1_000
"""Milliseconds for which a receiver polls once more after its timeout. If its own process was stopped, it finds what has arrived meanwhile."""
_HELLO, _MORE, _CHUNK, _END, _REFUSED = b"H", b"M", b"C", b"E", b"R"


def _tag(key: bytes, kind: bytes, number: int, payload: Any = b"") -> bytes:
    hasher = blake3(payload, key=key)  # first: BLAKE3 is fastest on whole blocks from its start
    hasher.update(kind + number.to_bytes(8, "little"))
    return bytes(hasher.digest(TAG_BYTES))


def keep_message_memory() -> None:
    """Reuse the memory of messages that were read for later messages. Up to about 60 MiB stay allocated.

    By default malloc of glibc returns the memory of each message to the kernel and asks for it again: 256 page faults a message, a tenth of
    the processor time of a stream. Allocating and freeing one block of
    31 MiB raises the threshold above which it does so.
    """
    np.empty(31 * 2**20, np.uint8)


def chunks(buffers: Iterable[Any]) -> Iterator[memoryview]:
    """Yield `buffers` (anything with a contiguous buffer) as byte views of at most CHUNK_BYTES; empty ones are skipped."""
    for buffer in buffers:
        view = np.frombuffer(buffer, np.uint8).data if memoryview(buffer).nbytes else memoryview(b"")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


class SharedTags:
    """The session key and the authentication codes of buffers that several streams carry.

    The buffers must not change while it is in use.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self._marks: dict[int, bytes] = {}

    def tag_frame(self, number: int, chunk: memoryview) -> bytes:
        """Return the first frame of the message of a chunk: its kind and its authentication code. It is computed once."""
        frame = self._marks.get(number)
        if frame is None:
            frame = self._marks[number] = _CHUNK + _tag(self.key, _CHUNK, number, chunk)
        return frame


class _Stream:
    """One offer and, once its ticket was shown, its receiver."""

    def __init__(self, buffers: Iterable[Any], share: SharedTags, now: float) -> None:
        self.key = share.key
        self._share = share
        self.chunks = chunks(buffers)
        self.number = 0
        self.credit = 0
        self.active_at = now

    def next_message(self) -> list[Any] | None:
        """Return the next message, None after the last one."""
        chunk = next(self.chunks, None)
        if chunk is None:
            return None
        message = [self._share.tag_frame(self.number, chunk), chunk]
        self.number += 1
        self.credit -= 1
        return message

    def end_message(self) -> list[Any]:
        """Return the message after the last chunk. Its authentication code covers the number of chunks."""
        return [_END + _tag(self.key, _END, self.number), b""]


class BulkSender:
    """Streams the buffers given to `offer`.

    Binds `tcp://host:port`, where port 0 means any free port. Raises ConfigError when it cannot bind.

    With `keys` the streams are encrypted, and only the groups that may use the service "weights" can connect.
    """

    def __init__(self, bind: str, keys: KeyRing | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._role = keys.role if keys is not None else "actor"
        self._socket = IoThread.shared().context.socket(zmq.ROUTER)
        sockets.configure(self._socket)
        self.address = IoThread.shared().run(lambda: self._bind(bind, keys))
        """`tcp://host:port` that tickets name."""
        self._offers: dict[bytes, _Stream] = {}
        self._streams: dict[bytes, _Stream] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._swept_at = clock()
        self._lock = threading.Lock()
        """Guards `_offers`: any thread adds offers, and the sender's thread removes them."""
        self._thread = threading.Thread(target=self._run, name="rljob-bulk", daemon=True)
        self._thread.start()

    def _bind(self, address: str, keys: KeyRing | None) -> str:
        try:
            if keys is not None:
                keys.serve(self._socket, "weights")
            return sockets.bind(self._socket, address)
        except BaseException:
            self._socket.close(0)
            raise

    def offer(self, buffers: Iterable[Any], *, share: SharedTags | None = None) -> BulkTicket:
        """Return a ticket for one stream of `buffers`. The buffers must not be written to until the stream has ended.

        `buffers` may be a generator, which runs on the sender's thread. Without `share` the stream has a session key of its own.
        """
        if self._closing:
            raise InfrastructureError(f"the bulk sender at {self.address} is closed; make a new one")
        ticket, share = secrets.token_bytes(16), share or SharedTags()
        with self._lock:
            self._offers[ticket] = _Stream(buffers, share, self._clock())
        return BulkTicket(address=self.address, ticket=ticket, key=share.key, role=self._role)

    def close(self) -> None:
        """End all streams and the thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            busy = any(stream.credit > 0 for stream in self._streams.values())
            poller.poll(0 if busy else int(TICKET_SECONDS * 1000))
            try:
                self._receive()
                self._send_round()
                self._drop_idle()
            except Exception:
                logger.exception("bulk sender at %s", self.address)
        self._socket.close()

    def _receive(self) -> None:
        while sockets.has_message(self._socket):
            peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            if parts[:1] == [_HELLO] and len(parts) == 2:
                self._open(peer, parts[1])
            elif parts[:1] == [_MORE] and peer in self._streams:
                self._streams[peer].credit += _CREDIT_STEP
                self._streams[peer].active_at = self._clock()

    def _open(self, peer: bytes, ticket: bytes) -> None:
        with self._lock:
            stream = self._offers.pop(ticket, None)
        if stream is None:
            self._send(peer, [_REFUSED, b"the ticket was used before, has expired or is not from here"])
            return
        stream.credit, stream.active_at = WINDOW, self._clock()
        self._streams[peer] = stream

    def _send_round(self) -> None:
        """Send a few chunks of each stream that has credit."""
        for peer, stream in list(self._streams.items()):
            for _ in range(min(stream.credit, _CREDIT_STEP)):
                if not self._send_one(peer, stream):
                    break

    def _send_one(self, peer: bytes, stream: _Stream) -> bool:
        try:
            message = stream.next_message()
        except Exception as error:  # whatever the source of the buffers raises belongs to the receiver
            logger.exception("the source of a bulk stream failed")
            refusal = [_REFUSED, f"the source failed: {error}".encode()]
            return self._finish(peer, refusal)
        if message is None:
            return self._finish(peer, stream.end_message())
        if not self._send(peer, message):
            del self._streams[peer]
            return False
        return True

    def _finish(self, peer: bytes, message: list[Any]) -> bool:
        self._send(peer, message)
        del self._streams[peer]
        return False

    def _send(self, peer: bytes, message: list[Any]) -> bool:
        try:
            sockets.send(self._socket, [peer, *message])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.info("a bulk receiver is gone; its stream is dropped")
            return False
        return True

    def _drop_idle(self) -> None:
        now = self._clock()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at, oldest = now, now - TICKET_SECONDS
        with self._lock:
            for ticket in [ticket for ticket, stream in self._offers.items() if stream.active_at < oldest]:
                del self._offers[ticket]
        for peer in [peer for peer, stream in self._streams.items() if stream.active_at < oldest]:
            del self._streams[peer]


class BulkReceiver:
    """Iterates over the chunks of a stream as read-only memoryviews, after verifying each. Each wait is bounded by `timeout` seconds.

    `keys` are needed when the sender has keys. `wake` is an eventfd; the wait ends when it becomes readable. Raises DeadlineExceeded with
    the address and the number of chunks received, FrameError when an authentication code or the count is wrong, and InfrastructureError
    when the ticket is refused, the source fails, or `wake` becomes readable. Not thread-safe.
    """

    def __init__(
        self,
        ticket: BulkTicket,
        keys: KeyRing | None = None,
        *,
        timeout: float = 60.0,
        wake: int | None = None,
    ) -> None:
        self._address, self._ticket, self._key = ticket.address, ticket.ticket, ticket.key
        self._role = ticket.role
        self._keys, self._timeout, self._wake = keys, timeout, wake
        self._number = 0

    def __iter__(self) -> Generator[memoryview, None, None]:
        keep_message_memory()
        socket = IoThread.shared().context.socket(zmq.DEALER)
        sockets.configure(socket)
        try:
            if self._keys is not None:
                self._keys.connect(socket, self._role)
            socket.connect(self._address)
            self._send(socket, _HELLO, self._ticket)
            while (chunk := self._next(socket)) is not None:
                if self._number % _CREDIT_STEP == 0:
                    self._send(socket, _MORE)
                yield chunk
        finally:
            socket.close(0)

    def _send(self, socket: zmq.Socket[Any], *parts: bytes) -> None:
        self._wait(socket, zmq.POLLOUT)  # a socket whose key was refused can never send
        socket.send_multipart(parts)

    def _next(self, socket: zmq.Socket[Any]) -> memoryview | None:
        if self._number % _CREDIT_STEP == 0 or not sockets.has_message(socket):
            self._wait(socket, zmq.POLLIN)
        frames = socket.recv_multipart(copy=False)
        if len(frames) != 2:
            raise FrameError(f"a bulk message must have 2 frames, got {len(frames)}")
        tag_frame, body = frames[0].bytes, frames[1].buffer
        kind, tag = tag_frame[:1], tag_frame[1:]
        if kind == _REFUSED:
            raise InfrastructureError(
                f"the bulk stream from {self._address} ended after {self._number} chunks: {bytes(body).decode(errors='replace')}"
            )
        expected = _tag(self._key, kind, self._number, body if kind == _CHUNK else b"")
        if kind not in (_CHUNK, _END) or not secrets.compare_digest(tag, expected):
            raise FrameError(f"chunk {self._number} of the bulk stream from {self._address} is not authentic")
        if kind == _END:
            return None
        self._number += 1
        return memoryview(body)

    def _wait(self, socket: zmq.Socket[Any], event: int) -> None:
        poller = zmq.Poller()
        poller.register(socket, event)
        if self._wake is not None:
            poller.register(self._wake, zmq.POLLIN)
        ready = dict(poller.poll(int(self._timeout * 1000)) or poller.poll(LAST_LOOK_MS))
        if self._wake in ready:
            raise InfrastructureError(f"the bulk stream from {self._address} was given up after {self._number} chunks")
        if not ready:
            message = f"sent nothing for {self._timeout:g} s after {self._number} chunks"
            raise DeadlineExceeded(f"the bulk stream from {self._address} {message}")
