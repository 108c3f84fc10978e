"""Starts `rljob run` from Python and follows it. Used by scripts and notebooks as `from rl_core import start_run`."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rl_core.api.defaults import short
from rl_core.api.job import RLJob
from rl_core.cli.job_file import with_absolute_paths
from rl_core.view.metrics import MetricColumns

POLL_S = 0.2
LAST_LINES = 12
"""Lines of output that an error quotes."""
INTERRUPTED = 130


class RunFailed(RuntimeError):
    """A run ended with another exit code than 0 or that of a stop; the text has the last lines that it printed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the run ended with exit code {code}\n" + "\n".join(text.splitlines()[-LAST_LINES:]))
        self.code = code


class LocalRun:
    """A run on this machine. It has its own processes, which continue when the Python process that started them ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path, log: Path, *, done: int) -> None:
        """`done`: the last step that the output folder held before, -1 for a new run."""
        self.output = output
        """Output folder, which `rljob view`, `rljob samples` and `rljob top` take."""
        self._process, self._log, self._previous_step = process, log, done

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each step as it ends, until the run ends. Raises RunFailed."""
        metrics, last_step = MetricColumns(self.output / "metrics.jsonl"), self._previous_step
        finished = False
        while not finished:
            finished = self._process.poll() is not None  # before the file is read: what the run wrote last counts
            for line in metrics.lines():
                if line["step"] > last_step:
                    last_step = line["step"]
                    yield line
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
        self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the run has ended. Raises RunFailed, and subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._process.wait(timeout)
        if code not in (0, INTERRUPTED):
            raise RunFailed(code, self.text())

    def stop(self) -> None:
        """Let the run save a checkpoint and end; return when it has. `start_run(..., resume="auto")` continues it. Raises RunFailed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self.wait()

    def text(self) -> str:
        """Return what the run has printed so far."""
        return self._log.read_text(errors="replace")


def start_run(job: RLJob, *, output: str | Path, code: str | Path = ".", resume: str = "none") -> LocalRun:
    """Start `job` on this machine and return at once.

    `output` is the output folder. Beside it lie `OUTPUT.yaml`, the job, which `rljob run` and `rljob submit` take, and `OUTPUT.log`, what the
    run prints. `code` is the folder at which relative paths of the job and the modules of user code are found. `resume` is auto, none or
    the path of a checkpoint, as of `rljob run`. Raises ConfigError, and writes nothing, when `output` holds a run that is not resumed.
    """
    # Imported here because it loads the launcher, which following a run does not need.
    from rl_core.cli.run import check_output

    output, folder = Path(output).resolve(), Path(code).resolve()
    check_output(output, resume)
    file, log = (output.with_name(output.name + suffix) for suffix in (".yaml", ".log"))
    file.parent.mkdir(parents=True, exist_ok=True)
    absolute = with_absolute_paths(job, folder / file.name)
    head = absolute.model_dump(mode="json", by_alias=True, exclude={"spec"}, exclude_none=True)
    file.write_text(yaml.safe_dump({**head, "spec": short(absolute.spec)}, sort_keys=False))
    lines = MetricColumns(output / "metrics.jsonl").lines()
    command = [sys.executable, "-m", "rl_core.cli.main", "run", str(file), "--output", str(output), "--resume", resume]
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [*command, "--no-progress"],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # An interrupted notebook cell interrupts `follow`, not the run.
        )
    return LocalRun(process, output, log, done=lines[-1]["step"] if lines else -1)
