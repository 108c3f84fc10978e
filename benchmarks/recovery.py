"""`kill -9` of a rollout worker and of the actor rank in a real run: seconds until it is noticed and until training goes on. Prints JSON.

The job is that of trl_side_by_side. Cases, each in a run of its own:
- `only_rollout`: the one rollout is killed, so the next step that ends proves that its replacement generated;
- `one_of_two_rollouts`: training goes on with the other; the longest step tells what it cost;
- `actor`: the launcher restarts the gang under the next epoch from the newest checkpoint (one every 10 steps).
Detection is the runner's log line (rollouts) or the process's leaving processes.json (actor). `limit_seconds` is what a new
rollout process needs before it can do anything: interpreter and imports, alone, in the same run.

    python benchmarks/recovery.py [--repeat N] [--cases ...] [--keep DIR]
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import _letters
import yaml
from _processes import RLJOB, Watched, read_lines, wait_for

WAIT_SECONDS = 240.0
WARM_STEPS = 25
"""Steps before the kill: two checkpoints are there."""
AFTER_STEPS = 15
IMPORTS = "import rl_core.workers.host, rl_core.rollouts.hf.worker"


class Victim:
    """A run that is to lose a process."""

    def __init__(self, folder: Path, *, rollouts: int, warm_steps: int = WARM_STEPS, **blocks: dict) -> None:
        """Start the run, with fields of `blocks` over those of the task, and wait until it has trained `warm_steps`."""
        self.output = folder / "out"
        _letters.make_task(folder, 0)
        document = _letters.job_document(
            folder, seed=0, steps=100_000, rollouts=rollouts, checkpoint={"everySteps": 10, "keep": 2}
        )
        for block, fields in blocks.items():
            document["spec"][block] |= fields
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        command = [RLJOB, "run", str(folder / "job.yaml"), "--output", str(self.output), "--no-progress"]
        self.run = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / "run.txt")
        self.wait(lambda: self.step() >= warm_steps, "the first steps")

    def wait(self, condition: Callable[[], object], what: str) -> float:
        """Return the time at which `condition` came true."""

        def alive() -> object:
            if self.run.process.poll() is not None:
                raise RuntimeError(f"the run ended while {what} was awaited")
            return condition()

        wait_for(alive, timeout=WAIT_SECONDS, what=what)
        return time.time()

    def lines(self) -> list[dict]:
        """Return the steps so far."""
        return read_lines(self.output / "metrics.jsonl")

    def step(self) -> int:
        """Return the last step of the present history."""
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def processes(self, **match) -> list[dict]:
        """Return the live processes that match."""
        found = json.loads((self.output / "processes.json").read_text())
        return [one for one in found if all(one[key] == value for key, value in match.items())]

    def kill(self, **match) -> tuple[int, float]:
        """SIGKILL the first process that matches; return its pid and the time."""
        pid = self.processes(**match)[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid, time.time()

    def logged(self, pattern: str) -> Callable[[], datetime | None]:
        """Return a condition: the time of the first line of the actor pod's log that matches."""
        line = re.compile(rf"(\d\d:\d\d:\d\d\.\d\d\d) .*{pattern}")
        path = self.output / "logs" / "actor-0.log"

        def look() -> float | None:
            found = line.search(path.read_text())
            return found and datetime.combine(
                datetime.now().date(), datetime.fromisoformat(f"1970-01-01T{found[1]}").time()
            )

        return look

    def end(self) -> None:
        """Stop the run in order, and by force when that takes too long."""
        self.run.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run.process.wait(30)
        self.run.end()


def rollout_killed(folder: Path, rollouts: int) -> dict[str, float]:
    """Kill the last of `rollouts` rollouts."""
    victim = Victim(folder, rollouts=rollouts)
    try:
        name, place = f"rollout:{rollouts - 1}", {"role": "rollout", "index": rollouts - 1}
        lost, serves = victim.logged(f"{name} is lost"), victim.logged(rf"{name} serves \(incarnation \(0, 1\)\)")
        usual = statistics.median(line["time/step"] for line in victim.lines()[5:] if line["step"])
        pid, killed = victim.kill(**place)
        held = victim.step()
        restarted = victim.wait(
            lambda: [one for one in victim.processes(**place) if one["pid"] != pid], "a new process"
        )
        victim.wait(serves, "the replacement")
        first = victim.wait(lambda: victim.step() > held + (rollouts > 1), "a step")
        victim.wait(lambda: victim.step() >= held + AFTER_STEPS, "steps afterwards")
        longest = max(line["time/step"] for line in victim.lines() if line["step"] > held)
        found = {
            "detected_seconds": lost().timestamp() - killed,
            "process_started_seconds": restarted - killed,
            "serving_seconds": serves().timestamp() - killed,
            "longest_step_seconds": longest,
            "usual_step_seconds": usual,
        }
        return found | ({"next_step_done_seconds": first - killed} if rollouts == 1 else {})
    finally:
        victim.end()


def actor_killed(folder: Path) -> dict[str, float]:
    """Kill the actor rank."""
    victim = Victim(folder, rollouts=1)
    try:
        pid, killed = victim.kill(role="actor")
        held = victim.step()
        noticed = victim.wait(lambda: not [p for p in victim.processes() if p["pid"] == pid], "the notice")
        trained = victim.wait(
            lambda: [line for line in victim.lines() if line["epoch"] == 1 and line["step"]], "a step"
        )
        first = next(line["step"] for line in victim.lines() if line["epoch"] == 1 and line["step"])
        caught_up = victim.wait(lambda: victim.lines()[-1]["epoch"] == 1 and victim.step() > held, "the lost steps")
        return {
            "detected_seconds": noticed - killed,
            "next_step_done_seconds": trained - killed,
            "steps_trained_again": held - first + 1,
            "caught_up_seconds": caught_up - killed,
        }
    finally:
        victim.end()


def import_seconds() -> float:
    """Return the time of interpreter and imports of a rollout process."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=_letters.one_thread())
    return time.monotonic() - started


CASES: dict[str, Callable[[Path], dict[str, float]]] = {
    "only_rollout": lambda folder: rollout_killed(folder, 1),
    "one_of_two_rollouts": lambda folder: rollout_killed(folder, 2),
    "actor": actor_killed,
}


def main() -> None:
    """Run the cases and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    report: dict[str, object] = {"target_detected_seconds": 2.0, "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        report["limit_seconds"] = round(min(import_seconds() for _ in range(2)), 2)
        for name in options.cases:
            runs = [CASES[name](folder / f"{name}-{number}") for number in range(options.repeat)]
            report[name] = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
            print(f"{name}: {report[name]}", file=sys.stderr)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
