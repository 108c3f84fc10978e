"""Reads a socket on the thread that waits for its messages.

The I/O thread reads all sockets and passes what it reads on to the threads that wait for it. A thread that has nothing else to do may read
one socket itself, which saves a change of threads for each message. Meanwhile the I/O thread does not watch this socket.
"""

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from rl_core.transports.interrupts import Interrupts
from rl_core.transports.sockets import LONGEST_SLEEP, IoThread, descriptor


class WaitingReader:
    """Lets one thread at a time read a socket that is registered with the I/O thread."""

    def __init__(
        self,
        io: IoThread,
        socket: zmq.Socket[Any],
        read: Callable[[], None],
        *,
        closed: Callable[[], bool],
        lock: "threading.RLock",
    ) -> None:
        """Read `socket` by `read()`, which must receive all messages that wait, or have the I/O thread receive the rest.

        The socket must be unregistered while `lock` is held, and `closed()` must be true from then on.
        """
        self._io, self._number, self._read = io, descriptor(socket), read
        self._closed, self._lock = closed, lock
        self._reader_lock = threading.Lock()
        """Held by the thread that reads the socket, so that only one does."""
        self._thread: int | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._poll = select.poll()
        self._poll.register(self._number, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def read_until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Read until `done()` is true, the socket is closed or `seconds` have passed (None: no limit).

        Another thread that has made `done()` true, or has closed the socket, must call `wake` afterwards. Returns True if this thread has read,
        also if the time passed or the socket was closed meanwhile: look at `done()` afterwards. Returns False at once, without reading, if
        another thread reads or the socket is already closed. KeyboardInterrupt ends the wait between two messages, never the reading of one,
        which may be for another thread.
        """
        with Interrupts.deferred() as interrupts:
            if not self._reader_lock.acquire(blocking=False):
                return False
            try:
                if not self._watch(False):
                    return False
                self._thread = threading.get_ident()
                try:
                    deadline = math.inf if seconds is None else time.monotonic() + seconds
                    self._read_until(done, deadline, interrupts)
                finally:
                    self._thread = None
                    self._watch(True)
                return True
            finally:
                self._reader_lock.release()

    def wake(self) -> None:
        """Let the thread that reads look at `done()`. Does nothing when no other thread reads."""
        if self._thread not in (None, threading.get_ident()):
            os.eventfd_write(self._wake, 1)

    def _read_until(self, done: Callable[[], bool], deadline: float, interrupts: Interrupts) -> None:
        while not done() and not self._closed():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            milliseconds = math.ceil(1000 * min(remaining, LONGEST_SLEEP))
            for number, _ in interrupts.allowed(self._poll.poll, milliseconds):
                if number == self._number:
                    self._read()
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)

    def _watch(self, by_io_thread: bool) -> bool:
        """Let the I/O thread watch the socket, or not. Returns whether the socket is open."""
        with self._lock:
            if self._closed():
                return False
            self._io.watch(self._number, by_io_thread)
            return True
