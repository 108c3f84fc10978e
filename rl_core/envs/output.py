"""What user code prints, on its way to the pod's log: passed on up to a bound per minute, then counted, so that no log fills the disk."""

import asyncio
import os
import time
from collections.abc import Callable

MOST_BYTES = 1 << 20
"""Bytes of one process that are passed on in a window."""
WINDOW_SECONDS = 60.0
_CHUNK = 1 << 16
_LAST_CHUNKS = 16
"""A pipe holds 64 KiB, or 1 MiB where somebody enlarged it."""


class BoundedOutput:
    """Passes what it is given on to `write`; what is beyond the bound of a window is left out and told at its end."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        most: int = MOST_BYTES,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._most, self._window, self._clock = write, most, window, clock
        self._began = clock()
        self._passed = self._left_out = 0

    def take(self, data: bytes) -> None:
        """Take what was printed."""
        if self._clock() - self._began >= self._window:
            self.tell()
            self._began, self._passed = self._clock(), 0
        room = self._most - self._passed
        if room > 0:
            self._write(data[:room])
        self._passed += min(len(data), max(room, 0))
        self._left_out += max(len(data) - max(room, 0), 0)

    def tell(self) -> None:
        """Say how much was left out since the last word on it."""
        if self._left_out:
            self._write(
                f"\nenv child: {self._left_out} bytes of output are left out: at most {self._most} in {self._window:.0f} s\n".encode()
            )
            self._left_out = 0


class Relay:
    """Passes what comes out of a pipe on to this process's output. On the event loop.

    Not asyncio's pipe of a subprocess: with one, the end of a process is told only when all that it started have closed the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        """Read `descriptor` until its end or `close`."""
        self._descriptor, self._open = descriptor, True
        self._bounded = BoundedOutput(lambda data: os.write(1, data))
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> bool:
        """Take one piece, so that a process that prints without end stops nothing else; return whether there was one."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._bounded.take(data)
        else:
            self._end()
        return bool(data)

    def close(self) -> None:
        """Take what is there and stop reading."""
        for _ in range(_LAST_CHUNKS):
            if not (self._open and self._read()):
                break
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._bounded.tell()
