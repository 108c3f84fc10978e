"""Shared memory of one RPC connection: what this side lends and what it has to give back. See `shared_memory`.

The store, reader and token are one per process; a `Link` is one per connection and is used by `rpc_client`, `rpc_server`.
"""

import atexit
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

from rl_core.transports import shared_memory
from rl_core.transports.frames import FrameHeader, Placement, read_header
from rl_core.transports.sockets import IoThread

TRIM_SECONDS = 30.0
"""Segments that nobody used for this long (up to twice) are deleted."""
RELEASE_SECONDS = 0.002
"""How long releases are gathered before they are sent."""


class SharedMemory:
    """Store, reader and token of this process. The first job uid given names the segments."""

    _shared: ClassVar["SharedMemory | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, uid: str = "") -> None:
        self.pid = os.getpid()
        shared_memory.remove_orphans(uid)  # of processes that were killed; their supervisor may be gone too
        self.store = shared_memory.SegmentStore(uid)
        self.reader = shared_memory.SegmentReader()
        self.token = shared_memory.Token(uid)

    @classmethod
    def shared(cls, uid: str = "") -> "SharedMemory":
        """Return the one of this process, made at first use."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls(uid)
                atexit.register(cls._shared.close)
                cls._shared._trim_later()
            return cls._shared

    def _trim_later(self) -> None:
        io = IoThread.shared()
        io.call_at(io.clock() + TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self.store.trim()
        self._trim_later()

    def close(self) -> None:
        """Delete all files of this process."""
        if self.pid == os.getpid():
            self.store.close()
            self.token.close()


class Link:
    """One connection's use of shared memory; off until `lends` is set because the peer proved it can read ours."""

    def __init__(self, send_release: Callable[[list[list[Any]]], Any], counters: Counter[str]) -> None:
        self.lends = False
        self._send_release = send_release
        self._counters = counters
        self._released: deque[list[Any]] = deque()
        self._scheduled = False
        self._io = IoThread.shared()

    def place(self, buffer: memoryview) -> Placement | None:
        """Copy a large array into a segment lent to the peer; None = send it by socket. Any thread."""
        if not self.lends or buffer.nbytes < shared_memory.THRESHOLD:
            return None
        placement = SharedMemory.shared().store.put(buffer, self)
        self._counters["shared_memory" if placement is not None else "shared_memory_full"] += 1
        return placement

    def resolve(self, placement: Placement, nbytes: int) -> memoryview:
        """Return the peer's memory; it is given back when the last array over it dies. Any thread."""
        entry = [placement.segment, placement.generation]
        return SharedMemory.shared().reader.view(
            placement.segment, placement.offset, nbytes, lambda: self._give_back(entry)
        )

    def discard(self, header: FrameHeader) -> None:
        """Give back the arrays of a message that nobody will read."""
        for placement in header.placed.values():
            self.give_back(placement)

    def give_back(self, placement: Placement) -> None:
        """Give back memory that was lent to this side and that nobody maps."""
        self._give_back([placement.segment, placement.generation])

    def retract(self, parts: list[Any]) -> None:
        """Free the arrays of an encoded message that was not sent."""
        for placement in read_header(parts[0]).placed.values():
            SharedMemory.shared().store.release(placement.segment, placement.generation, self)

    def take_back(self, released: Any) -> None:
        """Free what the peer released."""
        store = SharedMemory.shared().store
        for name, generation in released:
            store.release(name, generation, self)

    def lost(self) -> None:
        """Free all that the peer held: it is gone."""
        self.lends = False
        SharedMemory.shared().store.release_holder(self)

    def _give_back(self, entry: list[Any]) -> None:
        # runs in finalizers: appends and flags only, no locks
        self._released.append(entry)
        if not self._scheduled:
            self._scheduled = True
            self._io.call_soon(self._schedule)

    def _schedule(self) -> None:
        self._io.call_at(self._io.clock() + RELEASE_SECONDS, self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        released = []
        while self._released:
            released.append(self._released.popleft())
        if released:
            self._send_release(released)
