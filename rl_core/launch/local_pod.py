"""One pod of a local run: its supervisor process, the events it sends, its log file, its end."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.observability import events
from rl_core.plan.launch import PodPlan
from rl_core.workers import processes
from rl_core.workers.child import LineReader

logger = logging.getLogger(__name__)


class LocalPod:
    """A started pod. The supervisor ends with this launcher: it sees the end of their socket."""

    def __init__(
        self,
        plan: PodPlan,
        *,
        attempt: int,
        plan_file: Path,
        log_file: Path | None,
        environ: Mapping[str, str],
        on_event: Callable[["LocalPod", dict[str, Any]], None],
        on_end: Callable[["LocalPod"], None],
    ) -> None:
        """Start the supervisor of `plan` with exactly the environment `environ`; must run on an event loop.

        All output of the pod goes to `log_file`; None is the standard error of this process.
        """
        self.plan = plan
        self.attempt = attempt
        self.returncode: int | None = None
        """Exit code once ended, 128 + n after signal n."""
        self.reason = ""
        """What the supervisor reported about the end."""
        self.failures: dict[str, str] = {}
        """Why a process of the pod ended, by its name, until it is started again."""
        self.expected = False
        """Whether its end was asked for."""
        self.draining = False
        """Whether the pod drains because its group was scaled down."""
        self.ended = asyncio.Event()
        self._on_event, self._on_end = on_event, on_end
        plan_file.write_text(plan.to_json())
        own_end, child_end = socket.socketpair()
        with open(2, "ab", closefd=False) if log_file is None else log_file.open("ab") as log, child_end:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "rl_core.launch.pod", str(plan_file)],
                env={**environ, events.VARIABLE: str(child_end.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._lines = LineReader(own_end.detach(), self._line)
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def role(self) -> str:
        """Role of the pod."""
        return self.plan.role

    @property
    def index(self) -> int:
        """Index inside the role."""
        return self.plan.index

    @property
    def running(self) -> bool:
        """Return whether the supervisor lives."""
        return self.returncode is None

    @property
    def retired(self) -> bool:
        """Whether the pod was asked to end and has ended, and is not replaced."""
        return self.expected and not self.running

    def terminate(self) -> None:
        """Ask the pod to end in order (SIGTERM)."""
        self.expected = True
        if self.running:
            processes.kill(self.pid, signal.SIGTERM)

    def kill(self, *, expected: bool = True) -> None:
        """Kill the pod: closing the socket makes its supervisor kill all processes. `expected` says whether the end counts as requested."""
        self.expected = self.expected or expected
        if self.running:
            self._lines.close()

    def _exited(self) -> None:
        code = processes.reap(self.pid)
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = self._popen.returncode = code
        self._lines.drain()
        self._lines.close()
        self.ended.set()
        self._on_end(self)

    def _line(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            logger.warning("pod %s sent a line that is no event: %.80r", self.plan.name, line)
            return
        if event.get("event") == "exit":
            self.reason = f"{event['reason']}\n{event['tail']}".rstrip()
        self._on_event(self, event)
