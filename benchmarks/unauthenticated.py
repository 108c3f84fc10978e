"""What 500 connections without a key cost a run: its step time, memory and processes, by turns in quiet and under attack. Prints JSON.

    python benchmarks/unauthenticated.py [--turns 5] [--seconds 10] [--connections 500] [--size recipe]

One `rljob run` trains on; `_unauthenticated.py` offers its connections to every port that the run listens on: silent ones, slow greetings,
frames as large as servers take and larger, slow bodies. Each turn is a quiet and an attacked window; `step` and `processor` are the
median step and the run's own processor time per step under attack over those in quiet: of each turn, and their median. `same` are the
ratios of neighbouring quiet windows, so what the machine adds itself.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _letters
import psutil
import yaml
from _processes import RLJOB, Watched, read_lines, wait_for

WARM_STEPS = 25
SETTLE_SECONDS = 1.0
"""Between windows: what begins or ends in it belongs to neither."""


class Target:
    """The run."""

    def __init__(self, folder: Path, size: str) -> None:
        """Start it and wait until it trains."""
        self.output = folder / "out"
        _letters.make_task(folder, 0, _letters.SIZES[size])
        document = _letters.job_document(folder, seed=0, steps=10**6, rollouts=2, size=_letters.SIZES[size])
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        command = [RLJOB, "run", str(folder / "job.yaml"), "--output", str(self.output), "--no-progress"]
        self.run = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / "run.txt", sampled=False)
        wait_for(lambda: len(self.steps()) >= WARM_STEPS, timeout=240, what="the first steps", poll=0.2)

    def steps(self) -> list[float]:
        """Return the seconds of each step so far."""
        return [line["time/step"] for line in read_lines(self.output / "metrics.jsonl") if line["step"] > 0]

    def ports(self) -> list[int]:
        """Return the ports that its processes listen on."""
        found = (c for process in self.run.tree() for c in process.net_connections("tcp"))
        return sorted({c.laddr.port for c in found if c.status == psutil.CONN_LISTEN})

    def processes(self) -> dict[int, str]:
        """Return its processes by pid, besides short-lived ones of no role."""
        return {entry["pid"]: entry["role"] for entry in json.loads((self.output / "processes.json").read_text())}

    def memory_mb(self) -> float:
        """Return the memory of all its processes, shared pages counted once."""
        return round(sum(process.memory_full_info().pss for process in self.run.tree()) / 2**20, 1)

    def processor_s(self) -> float:
        """Return the processor time that its processes have taken."""
        return sum(sum(process.cpu_times()[:2]) for process in self.run.tree())

    def window(self, seconds: float) -> dict:
        """Return what the steps of the next seconds came to."""
        time.sleep(SETTLE_SECONDS)
        before, used = len(self.steps()), self.processor_s()
        time.sleep(seconds)
        found, used = self.steps()[before:], self.processor_s() - used
        return {
            "steps": len(found),
            "step_ms": round(1e3 * statistics.median(found[1:]), 1),  # the first began before the window
            "processor_ms": round(1e3 * used / len(found), 1),
            "memory_mb": self.memory_mb(),
        }


def turns(target: Target, attacker: subprocess.Popen, count: int, seconds: float) -> tuple[list, list, list]:
    """Return the quiet windows, the attacked ones, and what the attacker did in those."""
    assert attacker.stdin is not None and attacker.stdout is not None
    quiet, attacked, told = [], [], []
    for _ in range(count):
        quiet.append(target.window(seconds))
        for word in ("on", "off"):
            attacker.stdin.write(word + "\n")
            attacker.stdin.flush()
            said = json.loads(attacker.stdout.readline())
            if word == "on":
                attacked.append(target.window(seconds))
        told.append(said)
    return quiet, attacked, told


def compared(quiet: list[dict], attacked: list[dict], name: str) -> dict:
    """Return how a figure of the attacked windows compares to that of the quiet ones."""
    before, under = ([window[name] for window in windows] for windows in (quiet, attacked))
    turns = [b / a for a, b in zip(before, under, strict=True)]
    return {
        "median": round(statistics.median(turns), 3),
        "turns": [round(each, 3) for each in turns],
        "same": [round(b / a, 3) for a, b in itertools.pairwise(before)],
    }


def main() -> None:
    """Run and attack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--size", choices=sorted(_letters.SIZES), default="recipe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = Target(Path(scratch), options.size)
        try:
            before, ports = target.processes(), target.ports()
            command = [sys.executable, str(Path(__file__).with_name("_unauthenticated.py")), str(options.connections)]
            with subprocess.Popen(
                [*command, *map(str, ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as attacker:
                quiet, attacked, told = turns(target, attacker, options.turns, options.seconds)
                attacker.terminate()
            ended = sorted(role for pid, role in before.items() if pid not in target.processes())
            alive = target.run.process.poll() is None
        finally:
            target.run.end()
    report = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "connections": options.connections,
        "ports": len(ports),
        "step": compared(quiet, attacked, "step_ms"),
        "processor": compared(quiet, attacked, "processor_ms"),
        "quiet": quiet,
        "attacked": attacked,
        "attacker": told,
        "run_goes_on": alive,
        "processes_that_ended": ended,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
