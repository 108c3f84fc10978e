"""Starts a command and watches the memory of its process tree."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

SAMPLE_SECONDS = 10.0
"""Between looks at the memory, which cost tens of milliseconds per process."""
RLJOB = str(Path(sys.executable).with_name("rljob"))


class Watched:
    """A child process and all it starts."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path, sampled: bool = True
    ) -> None:
        """Run `command`; its output goes to `log`. `sampled` False: the memory is looked at by `sample()` only."""
        self._log = log
        self.started = time.time()
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=cwd, env=dict(env), stdout=file, stderr=subprocess.STDOUT)
        self.peak_pss_mb = 0.0
        """Largest memory of all processes together, shared pages counted once."""
        self._ended = threading.Event()
        if sampled:
            threading.Thread(target=self._keep_sampling, daemon=True).start()

    def _keep_sampling(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Look at the memory now."""
        self.peak_pss_mb = max(self.peak_pss_mb, sum(map(_pss, self.tree())) / 2**20)

    def tree(self) -> list[psutil.Process]:
        """Return the live processes."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        """Stop all processes where they are."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all processes go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, timeout: float) -> float:
        """Return the seconds the command took. Raises RuntimeError with the end of its output when it fails."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            code = -1
        self._ended.set()
        if code != 0:
            raise RuntimeError(f"{self.process.args} ended with {code}: {self._log.read_text()[-3000:]}")
        return time.time() - self.started

    def end(self) -> None:
        """End what still runs."""
        for process in self.tree():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._ended.set()


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def read_lines(path: Path) -> list[dict]:
    """Return the JSON lines of a file that may still be written to."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(condition, *, timeout: float, what: str, poll: float = 0.005):
    """Return the first true value of `condition()`. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(poll)
    raise TimeoutError(f"{what} within {timeout} s")
