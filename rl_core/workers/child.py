"""A child process of a supervisor: starts it, forwards its output, receives its events, and reports its end.

The child leads a process group, so that all its descendants can be killed with it. The kernel kills the child when the supervisor ends.
Output and events arrive on two pipes, which the event loop of the supervisor reads.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.observability import events
from rl_core.workers import processes

logger = logging.getLogger(__name__)
TAIL_BYTES = 4096
"""Bytes of a child's newest output that are kept."""
_CHUNK = 65_536


class LineReader:
    """Reads lines from a pipe on the event loop without blocking. A last line without a newline is delivered when the pipe is closed."""

    def __init__(self, fd: int, on_line: Callable[[bytes], None]) -> None:
        """Read from the file descriptor `fd` and call `on_line(line)`, without the newline, for each line."""
        self._fd = fd
        self._on_line = on_line
        self._partial_line = b""
        self._open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.drain)

    def drain(self) -> None:
        """Deliver the lines that have arrived."""
        while self._open:
            try:
                data = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._on_line(line)
            if len(self._partial_line) > _CHUNK:  # A progress bar, for example, writes no newline.
                self._on_line(self._partial_line)
                self._partial_line = b""

    def close(self) -> None:
        """Deliver the last line and close the pipe."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            if self._partial_line:
                self._on_line(self._partial_line)


class Child:
    """A child process. `returncode` is None while it runs, and then its exit code, or 128 + n after signal n."""

    def __init__(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        *,
        on_output: Callable[[bytes], None],
        on_event: Callable[["Child", dict[str, Any]], None],
        on_end: Callable[["Child"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start `command` with exactly the environment `env`.

        The callbacks run on the event loop: `on_output(line)` for a line of stdout or stderr, `on_event(child, event)` for an event other
        than `alive`, and `on_end(child)` once the process has ended and its output is read. Raises OSError when the process cannot be
        started.
        """
        self.name = name
        self.returncode: int | None = None
        self.state: str | None = None
        """State in the last report of the process. None before its first report."""
        self.started = clock()
        """Time of its start on the clock, in seconds."""
        self.last_alive: float | None = None
        """Time of its last `alive` event on the clock, in seconds. None before the first."""
        self.tail: deque[bytes] = deque()
        """Its newest output lines, together at most TAIL_BYTES."""
        self._tail_bytes = 0
        self._clock = clock
        self._on_output, self._on_event, self._on_end = on_output, on_event, on_end
        self._spawn(command, env)

    def _spawn(self, command: list[str], env: Mapping[str, str]) -> None:
        parent = os.getpid()
        out_read, out_write = os.pipe()
        event_read, event_write = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command,
                env={**env, events.VARIABLE: str(event_write)},
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=subprocess.STDOUT,
                pass_fds=(event_write,),
                process_group=0,
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
        except OSError:
            os.close(out_read)
            os.close(event_read)
            raise
        finally:
            os.close(out_write)
            os.close(event_write)
        self.pid = self._popen.pid
        self._output = LineReader(out_read, self._line)
        self._events = LineReader(event_read, self._event)
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.returncode is None

    def signal(self, signum: int) -> None:
        """Send a signal to the process only, not to its descendants."""
        if self.running:
            processes.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the process and all processes of its group."""
        processes.kill_group(self.pid, signal.SIGKILL)

    def _ended(self) -> None:
        code = processes.reap(self.pid)
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = self._popen.returncode = code
        processes.kill_group(self.pid, signal.SIGKILL)  # Kills the descendants that are still in its process group.
        for reader in (self._events, self._output):
            reader.drain()
            reader.close()
        self._on_end(self)

    def _line(self, line: bytes) -> None:
        self.tail.append(line)
        self._tail_bytes += len(line) + 1
        while self._tail_bytes > TAIL_BYTES and len(self.tail) > 1:
            self._tail_bytes -= len(self.tail.popleft()) + 1
        self._on_output(line)

    def _event(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            logger.warning("%s wrote a line that is no event: %.80r", self.name, line)
            return
        if kind == "alive":
            self.last_alive = self._clock()
            self.state = event.get("state", self.state)
        else:
            self._on_event(self, event)
