"""Shared memory of an RPC connection: the server lends segments by name and the client returns them. Used by the channel.

`ProcessSharedMemory` is one per process. `ServerLoans` is the server's end of a connection and the holder of what was lent to it; `ClientLoans` is
the client's end. See `shared_memory` for the segments themselves.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rl_core.transports import shared_memory, tokens
from rl_core.transports.shared_memory import LentMemory, SegmentLoan
from rl_core.transports.sockets import IoThread

TRIM_SECONDS = 30.0
"""Segments that were not used for this time (up to twice as long) are deleted. Allocating a new one takes several times as long as a copy of
its size, and the steps of a training may be minutes apart."""
RELEASE_SECONDS = 0.002
"""How long releases are gathered before they are sent."""


class ProcessSharedMemory:
    """The segment store, the segment reader and the token of this process.

    The job uid that is given first becomes part of the segments' names.
    """

    _shared: ClassVar["ProcessSharedMemory | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Guards `_shared`: two threads at first use must not make two stores of one name."""

    def __init__(self, uid: str = "") -> None:
        self.pid = os.getpid()
        tokens.remove_orphans()  # of processes that were killed; their supervisor may be gone too
        self.token = tokens.Token(uid)  # before the first segment: what has no token is taken for a dead process's
        self.store = shared_memory.SegmentStore(uid)
        self.reader = shared_memory.SegmentReader()

    @classmethod
    def shared(cls, uid: str = "") -> "ProcessSharedMemory":
        """Return the instance of this process. It is created at first use."""
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


class ServerLoans:
    """The server's end: records which of its segments a client holds."""

    def __init__(self) -> None:
        self.lends = False
        """Whether the client proved that it can read this process's segments."""

    def take_back(self, released: list[list[Any]]) -> None:
        """End one hold of the client on each segment in `released`: [segment, generation, whether it may be lent again]."""
        store = ProcessSharedMemory.shared().store
        for name, generation, reuse in released:
            store.release(name, generation, self, reuse=reuse)

    def lost(self) -> None:
        """Free all segments that the client held, after its connection is lost."""
        self.lends = False
        ProcessSharedMemory.shared().store.release_holder(self)


class ClientLoans:
    """The client's end of a connection: gives access to shared memory that the server has lent, and gives it back."""

    def __init__(self, send_release: Callable[[list[list[Any]]], Any]) -> None:
        self._send_release = send_release
        self._released: deque[list[Any]] = deque()
        self._scheduled = False
        self._io = IoThread.shared()

    def borrow(self, loan: SegmentLoan, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes, from `offset` on, of a shared-memory segment that the server has lent to this process for reading. Thread-safe.

        Nothing is copied. The view must not be written to, because other consumers may read the same bytes. The memory is given back when the
        last array that uses the view is deleted. Raises FrameError if it cannot be mapped or is shorter.
        """
        reader = ProcessSharedMemory.shared().reader
        return reader.view(loan.segment, offset, nbytes, lambda: self.release(loan))

    def lent(self, loan: SegmentLoan, nbytes: int) -> LentMemory:
        """Return the first `nbytes` bytes of memory that the server has lent for writing. The caller must release them."""
        reader = ProcessSharedMemory.shared().reader
        return LentMemory(
            loan, lambda: reader.view(loan.segment, 0, nbytes), lambda reuse: self.release(loan, reuse=reuse)
        )

    def release(self, loan: SegmentLoan, *, reuse: bool = True) -> None:
        """Give back one hold on a segment. `reuse` says whether it may be lent again. Thread-safe.

        It takes no lock, because a finalizer may call it while its thread holds any lock.
        """
        self._released.append([loan.segment, loan.generation, reuse])
        if not self._scheduled:
            self._io.call_soon(self._schedule)

    def _schedule(self) -> None:
        if not self._scheduled:  # set here and not by the caller, which an interrupt may end between two instructions
            self._scheduled = True
            self._io.call_at(self._io.clock() + RELEASE_SECONDS, self._flush)

    def _flush(self) -> None:
        self._scheduled = False  # before the look at the queue: whoever appends later schedules the next flush
        released = []
        while self._released:
            released.append(self._released.popleft())
        if released:
            self._send_release(released)
