"""`EngineProcess`: starts the engine's child process, exchanges messages with it, and kills it. `SGLangEngine` owns one at a time."""

from __future__ import annotations

import logging
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
from rl_core.messages.engine import EngineFailure, EngineReady, EngineSettings
from rl_core.observability import events
from rl_core.rollouts.sglang.child.stages import STAGE
from rl_core.transports import pipe, tokens
from rl_core.workers import processes

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""How often a start checks whether it was cancelled."""
REPORT_S = 30.0
"""How often it is logged that an engine is still starting, or answers nothing."""
REAP_SECONDS = 10.0
"""How long a killed child may take to end; one that takes longer hangs in the kernel."""
STDERR = 2
END_S = 1.0
"""How long to wait for a child whose stream has ended to exit, and for the rest of its output."""
DEATH = re.compile(rb"hit an exception|crashed with exit code|terminate called")
"""Lines that SGLang writes when one of its processes dies: a traceback follows, or the line itself has the reason."""


class EngineProcess:
    """A child process and the socket to it.

    It must be created, read and killed on one thread, and that thread must outlive it: the kernel kills the child when the thread ends.
    """

    def __init__(
        self,
        source: EngineSettings,
        environ: Mapping[str, str],
        memory: int,
        on_stage: Callable[[str], object] = lambda stage: None,
    ) -> None:
        """Start the child with the variables `environ`. Raises InfrastructureError if it cannot be started.

        `source` says which engine the child builds; `memory` is the descriptor of the memory shared with it. `on_stage` is called, on a
        thread of its own, with what the engine's start does.
        """
        self._on_stage = on_stage
        own_end, child_end = socket.socketpair()
        command = [sys.executable, "-P", "-u", "-m", "rl_core.rollouts.sglang.child"]
        numbers = [str(child_end.fileno()), str(memory), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command + numbers,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(child_end.fileno(), memory),
                start_new_session=True,  # Ctrl-C does not reach it, and the whole group can be killed at once
            )
        except OSError as error:
            own_end.close()
            raise InfrastructureError(f"the engine's process could not be started: {error}") from error
        finally:
            child_end.close()
        self._owner = source.owner
        self.pids = [self._process.pid]
        """The process ids of the engine, the child's first."""
        self._report("started", self._process.pid)
        self._cause = ""
        """Reason that one of its processes wrote when it died; "" if none did."""
        self._last_line = "none"
        """What its processes wrote last."""
        self._output = threading.Thread(target=self._copy_output, name="rljob-engine-err", daemon=True)
        self._output.start()
        self._stream = own_end
        self._poll = select.poll()  # select() does not support descriptors above 1,023.
        self._poll.register(own_end, select.POLLIN)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A thread of its own: a stopped child reads nothing, and the event loop must not block on it.
        threading.Thread(target=self._write, name="rljob-engine-out", daemon=True).start()
        self.send(source)

    def send(self, message: Any) -> None:
        """Queue a message for the child. May be called from any thread; never blocks."""
        self._outbox.put(pipe.pack(message))

    def receive(self, seconds: float, message_seconds: float) -> Any:
        """Return the next message, or None if none begins within `seconds`.

        Raises EOFError at the end of the stream, and TimeoutError if a message that began does not continue for `message_seconds`.
        """
        if not self._poll.poll(seconds * 1000):
            return None
        self._stream.settimeout(message_seconds)
        return pipe.receive_blocking(self._stream)

    def await_ready(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Return once the engine is ready, or `cancelled()`. Raises InfrastructureError if it fails or takes more than `seconds`."""
        started = reported = time.monotonic()
        answer = None
        try:
            while answer is None and (now := time.monotonic()) - started < seconds and not cancelled():
                answer = self.receive(LOOK_S, seconds)
                if now - reported > REPORT_S:
                    reported = now
                    logger.info(
                        "the engine has been starting for %.0f s of at most %g s; its last output: %s",
                        now - started,
                        seconds,
                        self._last_line,
                    )
        except (EOFError, OSError) as error:
            raise InfrastructureError(
                f"the engine's process {self.how_it_ended()} before the engine was up; its last output is in this log"
            ) from error
        if answer is None and cancelled():
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
        """Return how the child ended, in words, and the reason if it wrote one. Waits up to END_S for its exit."""
        try:
            code = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            return "closed its stream"
        self._output.join(END_S)
        exit_text = f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{exit_text}; it said: {self._cause}" if self._cause else exit_text

    def kill(self) -> None:
        """Kill the child and all processes of the engine, reap it, and remove its file in shared memory. Idempotent.

        Raises InfrastructureError if it has not ended REAP_SECONDS after the signal.
        """
        if self._stream.fileno() == -1:
            return
        processes.kill_group(self._process.pid, signal.SIGKILL)
        self._outbox.put(None)
        self._stream.close()
        try:
            self._process.wait(timeout=REAP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(
                f"the engine's process {self._process.pid} must end within {REAP_SECONDS:g} s of SIGKILL, it hangs in the kernel and "
                "keeps its memory; the pod must be replaced, see the driver's messages on the node"
            ) from error
        tokens.remove_engine_files(self._owner)
        self._report("ended", self._process.pid)

    def _report(self, event: str, pid: int) -> None:
        """Report a process event to the supervisor, which lists the process in processes.json."""
        parent = os.getpid() if pid == self._process.pid else self._process.pid
        events.report(event, name="engine", pid=pid, parent=parent, process="engine")

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._stream.sendall(data)
            except OSError:  # The child has ended, which the reader of the stream reports.
                return

    def _copy_output(self) -> None:
        """Copy the output of the engine's processes to the worker's log, and keep the first reason of a death."""
        traceback = False
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with suppress(OSError):  # nobody reads our log any more, but the engine's output must still be drained
                    os.write(STDERR, line)
                text = line.decode(errors="replace").strip()
                if text.startswith(STAGE):
                    self._on_stage(text.removeprefix(STAGE))
                self._last_line = text or self._last_line
                if self._cause:
                    continue
                if DEATH.search(line):
                    traceback = b"Traceback" in line
                    if traceback:
                        continue
                elif not traceback or line[:1].isspace():
                    continue
                self._cause = text
