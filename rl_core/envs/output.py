"""Copies the output of user code to the pod's log, up to a limit per minute, so that the log cannot fill the disk."""

import asyncio
import os
import time
from collections.abc import Callable

MOST_BYTES = 1 << 20
"""Bytes of one process that are written in a window."""
WINDOW_SECONDS = 60.0
_CHUNK = 1 << 16
_LAST_CHUNKS = 16
"""Chunks that are read at the end: a pipe has 64 KiB, or at most 1 MiB if it was enlarged."""


class BoundedOutput:
    """Writes output up to a limit of bytes per time window. At the end of a window it writes how many bytes were left out."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        most: int = MOST_BYTES,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pass output to `write`. `most` is the largest number of bytes per window of `window` seconds; `clock` returns seconds."""
        self._write, self._max_bytes, self._window, self._clock = write, most, window, clock
        self._window_start = clock()
        self._num_written = self._num_dropped = 0

    def take(self, data: bytes) -> None:
        """Write `data`, or as much of it as the limit of the window allows."""
        if self._clock() - self._window_start >= self._window:
            self.report_omitted()
            self._window_start, self._num_written = self._clock(), 0
        num_free = self._max_bytes - self._num_written
        if num_free > 0:
            self._write(data[:num_free])
        self._num_written += min(len(data), max(num_free, 0))
        self._num_dropped += max(len(data) - max(num_free, 0), 0)

    def report_omitted(self) -> None:
        """Write how many bytes were left out since the last such line, if any."""
        if self._num_dropped:
            self._write(
                f"\nenv child: {self._num_dropped} bytes of output are left out: at most {self._max_bytes} in {self._window:.0f} s\n".encode()
            )
            self._num_dropped = 0


def _to_standard_output(data: bytes) -> None:
    os.write(1, data)


class PipeCopier:
    """Copies the data of a pipe to the standard output of this process, or to `write`. Used on the event loop.

    asyncio's own subprocess pipes are not used, because with them the end of a process is reported only when all processes that it started
    have closed the pipe.
    """

    def __init__(self, descriptor: int, write: Callable[[bytes], object] = _to_standard_output) -> None:
        """Read `descriptor` until its end or `close`."""
        self._descriptor, self._open = descriptor, True
        self._bounded = BoundedOutput(write)
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> bool:
        """Read one chunk, so that endless output does not block the event loop; return whether there was one."""
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
        """Read the rest of the output from the pipe, and stop."""
        for _ in range(_LAST_CHUNKS):
            if not (self._open and self._read()):
                break
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._bounded.report_omitted()
