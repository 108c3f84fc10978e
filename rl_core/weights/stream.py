"""Weights by ZeroMQ for receivers that do not share the publisher's memory (runtime.md 4, bulk streams).

The publisher hands out a one-time ticket and a key over RPC (CURVE where there are keys); the stream itself is plain ZeroMQ
and carries a BLAKE3 tag under that key per chunk: authentic, not secret (`weights.encrypt` adds CURVE). A chunk is 1 MiB of
the host copy. The receiver grants credit, so that several chunks are in flight and a dead receiver costs nobody anything.

    receiver -> publisher: [ticket, credit as 4 bytes]        publisher -> receiver: [index as 8 bytes, tag, data]
"""

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from blake3 import blake3

from rl_core.api.errors import FrameError, InfrastructureError
from rl_core.transports import sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.sockets import IoThread
from rl_core.weights.assembly import Piece
from rl_core.weights.host_copy import HostCopy

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
WINDOW = 16
"""Chunks in flight per receiver."""
GRANT = 4
"""Chunks per credit message."""
SILENCE_SECONDS = 15.0
"""A publisher that sends nothing for so long is gone: heartbeats and reconnection had their time."""


def chunk_tag(key: bytes, index: int, data: Any) -> bytes:
    """Return the keyed BLAKE3 of chunk `index`; the position is part of it, so chunks cannot be swapped."""
    tagger = blake3(index.to_bytes(8, "little"), key=key)
    tagger.update(data)
    digest: bytes = tagger.digest()
    return digest


@dataclass(slots=True)
class _Stream:
    """One receiver's stream. Only the server's thread touches it after `open`."""

    copy: HostCopy
    tags: "_Tags"
    routing_id: bytes | None = None
    """Who presented the ticket first; nobody else may use it."""
    next: int = 0
    credit: int = 0


@dataclass(slots=True)
class _Tags:
    """Key and tags of one host copy, shared by its streams: each chunk is hashed once, whoever asks first."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    known: dict[int, bytes] = field(default_factory=dict)

    def of(self, index: int, data: np.ndarray) -> bytes:
        """Return the tag of a chunk."""
        tag = self.known.get(index)
        if tag is None:
            tag = self.known[index] = chunk_tag(self.key, index, data)
        return tag


class StreamServer:
    """Sends host copies; one thread, started with the first stream. `open` and `end` may be called from any thread."""

    def __init__(self, bind: str, keys: KeyRing | None, *, encrypt: bool) -> None:
        """`bind`: as the publisher's RPC address, any port. `encrypt` needs keys."""
        sockets.check_reach(bind, has_keys=keys is not None, verb="bind")
        self.counters: Counter[str] = Counter()
        """streams, chunks, refused (unknown or stolen tickets)."""
        self._bind, self._keys, self._encrypt = bind, keys, encrypt
        self._streams: dict[bytes, _Stream] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._address = ""

    def open(self, copy: HostCopy) -> dict[str, Any]:
        """Return the source a receiver needs to fetch `copy`, which must be held until `end`."""
        if self._thread is None:
            self._start()
        ticket = secrets.token_bytes(16)
        tags = next((stream.tags for stream in list(self._streams.values()) if stream.copy is copy), None) or _Tags()
        self._streams[ticket] = _Stream(copy, tags)
        self.counters["streams"] += 1
        return {
            "kind": "stream",
            "address": self._address,
            "ticket": ticket,
            "key": tags.key,
            "nbytes": copy.layout.nbytes,
            "encrypt": self._encrypt,
        }

    def end(self, source: Mapping[str, Any]) -> None:
        """Send no more of a stream."""
        self._streams.pop(source.get("ticket", b""), None)

    def close(self) -> None:
        """End all streams and the thread."""
        if self._thread is not None:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(5)
        os.close(self._wake)

    def _start(self) -> None:
        # a context of its own: its ZeroMQ thread moves the weights while the shared one keeps RPC quick; keys are checked
        # by the handler of the shared one
        self._context = IoThread.shared().context if self._encrypt else zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        sockets.configure(socket)
        if self._encrypt and self._keys is not None:
            self._keys.serve(socket, "weights")
        host, _ = sockets.split_address(self._bind)
        self._address = sockets.bind(socket, f"tcp://{host}:0")
        self._thread = threading.Thread(target=self._run, args=(socket,), name="rljob-weight-stream", daemon=True)
        self._thread.start()

    def _run(self, socket: Any) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stopping:
            poller.poll()
            while self._take(socket):
                pass
            while self._send_round(socket):
                self._take(socket)
        socket.close(0)
        if not self._encrypt:
            self._context.term()

    def _send_round(self, socket: Any) -> bool:
        """Send each stream one chunk, so that receivers progress together and a tag is computed once for all of them."""
        sent = [self._send(socket, stream) for stream in list(self._streams.values())]
        return any(sent)

    def _take(self, socket: Any) -> bool:
        try:
            routing_id, *parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        stream = self._streams.get(parts[0]) if len(parts) == 2 and len(parts[1]) == 4 else None
        if stream is None or stream.routing_id not in (None, routing_id):
            self.counters["refused"] += 1
            return True
        stream.routing_id = routing_id
        stream.credit += int.from_bytes(parts[1], "little")
        return True

    def _send(self, socket: Any, stream: _Stream) -> bool:
        start = stream.next * CHUNK
        if stream.credit <= 0 or start >= stream.copy.layout.nbytes:
            return False
        data = stream.copy.memory[start : start + CHUNK]
        tag = stream.tags.of(stream.next, data)
        try:
            socket.send(stream.routing_id, zmq.SNDMORE | zmq.NOBLOCK)
            socket.send_multipart([stream.next.to_bytes(8, "little"), tag], zmq.SNDMORE)
            socket.send(data, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            stream.credit = 0  # the receiver is gone; if it comes back, it has a new ticket
            return False
        stream.next += 1
        stream.credit -= 1
        self.counters["chunks"] += 1
        return True


class StreamClient:
    """Fetches one host copy in the calling thread; `interrupt` ends it from another."""

    def __init__(self, source: Mapping[str, Any], keys: KeyRing | None, wake: int) -> None:
        """`wake`: an eventfd that becomes readable when the transfer should stop."""
        self._source, self._wake = source, wake
        encrypt = bool(source["encrypt"])
        self._context = IoThread.shared().context if encrypt else zmq.Context()
        self._owns_context = not encrypt
        self._socket = self._context.socket(zmq.DEALER)
        sockets.configure(self._socket)
        if encrypt and keys is not None:
            keys.connect(self._socket, "actor")
        self._socket.connect(source["address"])

    def pieces(self) -> Iterator[Piece]:
        """Yield the chunks in order, each after its tag held.

        Raises FrameError for a chunk that is not authentic or out of order, InfrastructureError when the publisher is
        silent for SILENCE_SECONDS or the transfer was interrupted.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        nbytes, key = self._source["nbytes"], self._source["key"]
        count = -(-nbytes // CHUNK)
        self._grant(WINDOW)
        for index in range(count):
            frames = self._receive(poller, index, count)
            if len(frames) != 3 or int.from_bytes(frames[0].bytes, "little") != index:
                raise FrameError(f"chunk {index} of {count} must come next, got {len(frames)} frames of another")
            data = np.frombuffer(frames[2].buffer, np.uint8)
            if data.size != min(CHUNK, nbytes - index * CHUNK) or chunk_tag(key, index, data) != frames[1].bytes:
                raise FrameError(f"chunk {index} of {count} is not authentic: size or BLAKE3 tag differ")
            yield index * CHUNK, data
            if index % GRANT == GRANT - 1:
                self._grant(GRANT)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(0)
        if self._owns_context:
            self._context.term()

    def _grant(self, chunks: int) -> None:
        self._socket.send_multipart([self._source["ticket"], chunks.to_bytes(4, "little")])

    def _receive(self, poller: zmq.Poller, index: int, count: int) -> list[zmq.Frame]:
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            ready = dict(poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
            if self._wake in ready:
                raise InfrastructureError(f"the transfer was interrupted at chunk {index} of {count}")
            if self._socket in ready:
                frames: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
                return frames
            if not ready:
                address = self._source["address"]
                raise InfrastructureError(
                    f"the publisher at {address} sent nothing for {SILENCE_SECONDS:g} s at chunk {index} of {count}"
                )
