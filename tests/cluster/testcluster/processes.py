"""Programs that outlive the command that started them. What runs is written down in the state, one file per program."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from tests.cluster.testcluster import procfs
from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.state import State

POLL_S = 0.02
NICENESS = -10
PATIENCE_S = 180.0
"""A busy machine may take minutes over what takes seconds; a program that ends is not waited for."""


class Program:
    """One program of the cluster, by name; any command that knows the state can stop, pause or start it again."""

    def __init__(self, state: State, name: str) -> None:
        self.name = name
        self.log = state.logs / f"{name}.log"
        self._state = state
        self._file = state.processes / f"{name}.json"

    def launch(self, command: Sequence[object], *, env: Mapping[str, str] | None = None) -> None:
        """Start the program with this command. Raises ClusterError when it runs already.

        A cluster with an owner gets the kernel's help: its programs end when the owner does. Where root starts them, they go before other
        processes: a kubelet that cannot renew its lease on a busy machine would lose its pods.
        """
        if self.running:
            raise ClusterError(f"{self.name} runs already (process {self.process.pid})")
        words = [str(word) for word in command]
        first = ["nice", "-n", str(NICENESS)] if os.geteuid() == 0 else []
        tied = ["setpriv", "--pdeathsig", "KILL", "--"] if self._state.settings.owner else []
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                first + tied + words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        identity = procfs.identify(process.pid)
        if identity is None:
            raise ClusterError(f"{self.name} ended as soon as it was started; see {self.log}")
        number = self._read()["number"] if self._file.exists() else len(programs(self._state))
        record = {"number": number, "command": words, "env": dict(env or {}), "process": asdict(identity)}
        self._write(record)

    def start(self) -> None:
        """Start the program again, with the command it had."""
        record = self._read()
        self.launch(record["command"], env=record["env"])

    @property
    def process(self) -> procfs.Identity:
        """The process last started."""
        return procfs.Identity(**self._read()["process"])

    @property
    def init(self) -> procfs.Identity | None:
        """Process 1 of the namespace the program made; None when it made none (only nodes do)."""
        init = self._read().get("init")
        return init and procfs.Identity(**init)

    @init.setter
    def init(self, identity: procfs.Identity) -> None:
        self._write({**self._read(), "init": asdict(identity)})

    @property
    def running(self) -> bool:
        """Whether the program runs (or is paused)."""
        return self._file.exists() and self.process.alive

    def pause(self) -> None:
        """Freeze the program: it keeps its connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused program go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self, *, sig: int = signal.SIGTERM, wait_s: float = 10) -> None:
        """End the program; by force when it has not ended after `wait_s`. Its command is kept for `start`."""
        if not self._file.exists():
            return
        process = self.process
        for each in (sig, signal.SIGKILL):
            if process.alive:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, each)
                    os.kill(process.pid, signal.SIGCONT)  # a paused process would never see the signal
            if _wait(lambda: not process.alive, wait_s):
                break
        if init := self.init:  # a namespace's process 1 goes last, after all others in it
            _wait(lambda: not init.alive, wait_s)

    def wait(self, what: str, ready: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the program is ready. Raises ClusterError with its last log lines when it ends or is late."""
        if not _wait(lambda: _quiet(ready) or not self.running, timeout_s):
            raise ClusterError(f"{self.name}: no {what} after {timeout_s:.0f} s\n{self._tail()}")
        if not self.running:
            raise ClusterError(f"{self.name} ended while waiting for {what}\n{self._tail()}")

    def _tail(self, lines: int = 10) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) + f"\n(whole log: {self.log})"

    def _read(self) -> dict:
        if not self._file.exists():
            raise ClusterError(f"{self.name} was never started in {self._state.folder}")
        return json.loads(self._file.read_text())

    def _write(self, record: dict) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(self._file)


def programs(state: State) -> list[Program]:
    """Every program ever started, in the order of their first start."""
    files = sorted(state.processes.glob("*.json"), key=lambda file: json.loads(file.read_text())["number"])
    return [Program(state, file.stem) for file in files]


def _quiet(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except OSError:  # it does not listen yet
        return False


def _wait(test: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
