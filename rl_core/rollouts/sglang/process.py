"""One start of the engine's child process, seen from the worker: spawned, spoken to, killed. `engine` owns one after the other."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rl_core.api.errors import InfrastructureError
from rl_core.messages.engine import EngineFailure, EngineReady, EngineSource
from rl_core.observability import events
from rl_core.transports import pipe
from rl_core.workers import processes

LOOK_S = 0.5
"""How often a start is looked at."""
REAP_SECONDS = 10.0
"""How long a killed child may take to end; one that still lives then hangs in the kernel."""
STDERR = 2
END_S = 1.0
"""How long the end of a child whose stream has ended, and that of its output, is waited for."""
DEATH = re.compile(rb"hit an exception|crashed with exit code|terminate called")
"""What SGLang writes when one of its processes dies: the exception's traceback follows, or the line says it all."""


class EngineProcess:
    """A child and its stream. Made, read and killed on one thread, which must live as long: the kernel kills the child with it."""

    def __init__(self, source: EngineSource, environ: Mapping[str, str], memory: int) -> None:
        """Start the child; `memory` is the descriptor of the memory that it shares. Raises InfrastructureError."""
        near, far = socket.socketpair()
        command = [sys.executable, "-P", "-u", "-m", "rl_core.rollouts.sglang.child"]
        numbers = [str(far.fileno()), str(memory), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command + numbers,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(far.fileno(), memory),
                start_new_session=True,  # Ctrl-C does not reach it, and all of it can be killed together
            )
        except OSError as error:
            near.close()
            raise InfrastructureError(f"the engine's process could not be started: {error}") from error
        finally:
            far.close()
        self.pids = [self._process.pid]
        """The processes of the engine, the child's own first."""
        self._report("started", self._process.pid)
        self._cause = ""
        """Why one of its processes died, by their own words; "" while none said so."""
        self._output = threading.Thread(target=self._pass_on, name="rljob-engine-err", daemon=True)
        self._output.start()
        self._stream = near
        self._poll = select.poll()  # not select(), which knows no descriptor above 1,023
        self._poll.register(near, select.POLLIN)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A thread of its own: a child that is stopped takes nothing, and the event loop must not wait for it.
        threading.Thread(target=self._write, name="rljob-engine-out", daemon=True).start()
        self.send(source)

    def send(self, message: Any) -> None:
        """Send a message, at once or as soon as the child takes it; from any thread."""
        self._outbox.put(pipe.pack(message))

    def receive(self, seconds: float, patience: float) -> Any:
        """Return the next message, None when none begins within `seconds`. Raises EOFError at the end of the stream.

        Raises TimeoutError for a message that stops in its middle for `patience` seconds.
        """
        if not self._poll.poll(seconds * 1000):
            return None
        self._stream.settimeout(patience)
        return pipe.receive_blocking(self._stream)

    def await_ready(self, seconds: float, gone: Callable[[], bool]) -> None:
        """Return once the engine is up, or `gone()`. Raises InfrastructureError with the reason when it is not within `seconds`."""
        deadline = time.monotonic() + seconds
        answer = None
        try:
            while answer is None and time.monotonic() < deadline and not gone():
                answer = self.receive(LOOK_S, seconds)
        except (EOFError, OSError) as error:
            raise InfrastructureError(
                f"the engine's process {self.how_it_ended()} before the engine was up; its last output is in this log"
            ) from error
        if answer is None and gone():
            return
        if isinstance(answer, EngineFailure):
            raise InfrastructureError(f"the engine could not be built: {answer.type}: {answer.message}")
        if not isinstance(answer, EngineReady):
            raise InfrastructureError(
                f"the engine must be up within {seconds:g} s, got {answer!r}; raise deadlines.waitReady"
            )
        for pid in answer.pids[1:]:
            self._report("started", pid)
        self.pids = answer.pids

    def how_it_ended(self) -> str:
        """Return the end of the child in words, with the cause that it told; waits for it for a moment."""
        try:
            code = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            return "closed its stream"
        self._output.join(END_S)
        ended = f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{ended}; it said: {self._cause}" if self._cause else ended

    def kill(self) -> None:
        """End the child and all processes of the engine, and reap it. A second call does nothing."""
        if self._stream.fileno() == -1:
            return
        processes.kill_group(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=REAP_SECONDS)
        self._outbox.put(None)
        self._stream.close()
        self._report("ended", self._process.pid)

    def _report(self, event: str, pid: int) -> None:
        """Tell the supervisor, so that processes.json names the process."""
        parent = os.getpid() if pid == self._process.pid else self._process.pid
        events.report(event, name="engine", pid=pid, parent=parent, process="engine")

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._stream.sendall(data)
            except OSError:  # it ended, or was killed; who reads its stream knows
                return

    def _pass_on(self) -> None:
        """Write what the engine's processes write to the worker's own log, and remember the first cause of a death."""
        traceback = False
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with suppress(OSError):  # whoever read our log is gone; the engine must still find a reader
                    os.write(STDERR, line)
                if self._cause:
                    continue
                if DEATH.search(line):
                    traceback = b"Traceback" in line
                    if traceback:
                        continue
                elif not traceback or line[:1].isspace():
                    continue
                self._cause = line.decode(errors="replace").strip()
