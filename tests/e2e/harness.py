"""One `rljob run` as a test sees it: its output folder, its processes, what must hold afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from rl_core.cli.local_control import connect
from rl_core.launch.workspace import PRIVATE
from rl_core.transports.tokens import DIRECTORY as SEGMENTS

STEP_DEADLINE_S = 300.0


def job_document(tiny: Path, **spec) -> dict:
    """Return a small job; `spec` is merged into the defaults, block by block."""
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"path": str(tiny / "model")},
            "data": {"train": str(tiny / "data/train.jsonl"), "validation": str(tiny / "data/validation.jsonl")},
            "algorithm": {"promptsPerStep": 4, "groupSize": 4, "steps": 6},
            "actor": {"optimizer": {"learningRate": 1.0e-3}},
            "rollout": {"replicas": 1, "maxSequenceLength": 32, "sampling": {"maxNewTokens": 12}},
            "env": {"type": "reward", "reward": "reward:letter_a"},
            "checkpoint": {"everySteps": 2, "everySeconds": None},
            "validation": {"everySteps": 100, "maxPrompts": 4},
            "trackers": [],
        },
    }
    for block, fields in spec.items():
        target = document["spec"].setdefault(block, {})
        if isinstance(fields, dict) and isinstance(target, dict):
            target.update(fields)
        else:
            document["spec"][block] = fields
    return document


def rljob(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an `rljob` command that ends by itself."""
    command = [sys.executable, "-m", "rl_core.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


class Output:
    """The output folder of a run, on this machine or of a job on a volume."""

    def __init__(self, folder: Path) -> None:
        self.output = folder

    def lines(self, name: str) -> list[dict]:
        path = self.output / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Run(Output):
    """One `rljob run` and its output folder."""

    def __init__(self, folder: Path, document: dict, *arguments: str, python_path: Path | None = None) -> None:
        super().__init__(folder / "out")
        folder.mkdir(parents=True, exist_ok=True)
        self.job = folder / "job.yaml"
        self.job.write_text(yaml.safe_dump(document))
        self.arguments = arguments
        self.env = os.environ | {"PYTHONPATH": str(python_path or folder), "OMP_NUM_THREADS": "1"}
        self.tree: Path | None = None
        """Where the packages of another version lie; None = this tree."""
        self.process: subprocess.Popen | None = None
        self.text = ""
        spec = document["spec"]
        self.own_metrics = (
            "program" in spec or "modules" in spec or any(":" in str(value) for value in spec["algorithm"].values())
        )
        """Whether functions of the job may report metrics of their own."""

    def start(self, *more: str) -> "Run":
        command = [
            sys.executable,
            "-m",
            "rl_core.cli.main",
            "run",
            str(self.job),
            "--output",
            str(self.output),
            "--no-progress",
        ]
        paths = [str(self.tree)] if self.tree is not None else []
        self.process = subprocess.Popen(
            [*command, *self.arguments, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env | {"PYTHONPATH": os.pathsep.join([*paths, self.env["PYTHONPATH"]])},
            cwd=self.tree,
        )
        return self

    def wait(self, seconds: float = 600) -> int:
        self.text, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def run(self, *more: str) -> int:
        return self.start(*more).wait()

    def until(self, condition: Callable[[], object], what: str, seconds: float = STEP_DEADLINE_S):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None  # looked at first: what the run told as its last counts
            if value := condition():
                return value
            if ended:
                pytest.fail(
                    f"the run ended with {self.process.returncode} while waiting for {what}\n{self.process.stdout.read()}\n{self.logs()}"
                )
            time.sleep(0.02)
        pytest.fail(f"{what} did not come within {seconds} s\n{self.logs()}")

    def live_step(self) -> int:
        """Return the step that the runner itself tells; status.json is up to a second behind."""
        return self.until(connect(self.output).status, "an answer of the runner")["step"]

    def end_soon(self) -> int:
        """Lower the number of steps to what will be done in a moment; return the last step once the run has ended."""
        spec = json.loads((self.output / ".rljob/job.json").read_text())["spec"]
        spec["algorithm"]["steps"] = self.live_step() + 2
        assert connect(self.output).change(1000, spec)
        assert self.wait() == 0, self.text + self.logs()
        return self.status()["step"]

    def metric_names(self) -> set[str]:
        """Return the names of all metrics that the run has written."""
        return {name for line in self.lines("metrics.jsonl") for name in line}

    def at_step(self, step: int) -> None:
        self.until(lambda: any(line["step"] >= step for line in self.lines("metrics.jsonl")[-1:]), f"step {step}")

    def status(self) -> dict:
        path = self.output / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def devices(self) -> dict:
        """Return `/status.devices` as the runner tells it now; {} while it does not answer."""
        if not (self.output / PRIVATE / "actor-0.json").is_file():
            return {}
        return (connect(self.output).status() or {}).get("devices") or {}

    def until_devices_are_for(self, use: str) -> None:
        self.until(lambda: self.devices().get("use") == use, f"the devices to be used for {use}")

    def processes(self, **match) -> list[dict]:
        path = self.output / "processes.json"
        found = json.loads(path.read_text()) if path.exists() else []
        return [p for p in found if all(p.get(key) == value for key, value in match.items())]

    def kill(self, **match) -> int:
        """SIGKILL the first live process that matches; return its pid."""
        entry = self.until(lambda: self.processes(**match), f"a process {match}")[0]
        os.kill(entry["pid"], signal.SIGKILL)
        return entry["pid"]

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted((self.output / "logs").glob("*.log")))

    def end(self) -> None:
        """End what a failed test left running."""
        if self.process is not None and self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            for process in [*children, psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(60)


def assert_trained_once(run: Output, *, steps: int, groups: int, staleness: int = 0) -> None:
    """Every step of the final history trained exactly `groups` groups, no group twice, no token older than the bound."""
    ledger = run.lines("ledger.jsonl")
    assert Counter(line["step"] for line in ledger) == dict.fromkeys(range(1, steps + 1), groups)
    ids = [line["group_id"] for line in ledger]
    assert len(ids) == len(set(ids))
    for line in ledger:
        trained = line["step"] - 1
        assert trained - staleness <= line["policy_version_min"] <= line["policy_version_max"] <= trained
    assert [line["step"] for line in run.lines("metrics.jsonl") if line["step"]] == list(range(1, steps + 1))


def assert_nothing_left(run: Run, pids: list[int]) -> None:
    """No process of the run is alive, no shared memory of it remains."""
    assert [pid for pid in pids if is_alive(pid)] == []
    assert [path.name for pid in pids for path in SEGMENTS.glob(f"rljob-*-{pid}-*")] == []


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
