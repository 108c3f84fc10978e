"""`rljob scale` from 1 to 4 rollouts in the middle of a real run: seconds from the request to the first finished group of each. Prints JSON.

The job is that of trl_side_by_side with 16 groups a step, of which an engine holds 4: each of four rollouts has its part. Of each new one
- `process_seconds`: its process is in processes.json;
- `serving_seconds`: it holds the current weights, by the runner's log;
- `first_group_seconds`: the data rank was told to train its first group, by the runner's `/status.workload`.
All from the moment in which `rljob scale` was started; `request_seconds` is what that command itself takes. `longest_step_seconds` is what the
start of the new processes costs the run meanwhile, beside `usual_step_seconds`. `limit_seconds` is what a new rollout process needs before it can
do anything, interpreter and imports, alone; `limit_together_seconds` is the same for the three at once, which share this machine's cores.

    python benchmarks/scale.py [--repeat N] [--keep DIR]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _letters
from _processes import RLJOB
from recovery import IMPORTS, Victim, import_seconds

from rl_core.cli.local_control import connect

REPLICAS = 4
GROUPS = {"promptsPerStep": 16}
FIRST_STEPS, AFTER_STEPS = 10, 10


def scaled(folder: Path) -> dict[str, float]:
    """Scale one run up; return the largest and smallest time of the new rollouts."""
    rows = 4 * _letters.SIZES["recipe"].group_size
    run = Victim(
        folder,
        rollouts=1,
        warm_steps=FIRST_STEPS,
        algorithm=GROUPS,
        rollout={"maxBatch": rows, "maxReplicas": REPLICAS},
    )
    try:
        control, new = connect(run.output), [f"rollout:{rank}" for rank in range(1, REPLICAS)]
        usual = statistics.median(line["time/step"] for line in run.lines()[3:] if line["step"])
        asked, held = time.time(), run.step()
        command = subprocess.Popen(
            [RLJOB, "scale", str(run.output), "--replicas", str(REPLICAS)],
            env=_letters.one_thread(),
            stdout=subprocess.DEVNULL,
        )
        began: dict[str, float] = {}
        first: dict[str, float] = {}
        told = 0.0

        def look() -> bool:
            nonlocal told
            if not told and command.poll() is not None:
                told = time.time() - asked
            for one in run.processes(role="rollout"):
                began.setdefault(f"rollout:{one['index']}", time.time() - asked)
            for one in ((control.status() or {}).get("workload") or {}).get("rollouts", []):
                if one["groups"]:
                    first.setdefault(one["name"], time.time() - asked)
            return first.keys() >= set(new)

        run.wait(look, "the first group of each new rollout")
        serving = [run.logged(rf"{name} serves ")().timestamp() - asked for name in new]
        run.wait(lambda: run.step() >= held + AFTER_STEPS, "steps afterwards")
        longest = max(line["time/step"] for line in run.lines() if line["step"] > held)
        found = {
            "process": [began[name] for name in new],
            "serving": serving,
            "first_group": [first[name] for name in new],
        }
        spread = {
            f"{name}_seconds_{end.__name__}": end(seconds) for name, seconds in found.items() for end in (min, max)
        }
        return {"request_seconds": told, **spread, "longest_step_seconds": longest, "usual_step_seconds": usual}
    finally:
        run.end()


def together_seconds() -> float:
    """Return the time of interpreter and imports of three rollout processes at once."""
    started = time.monotonic()
    children = [
        subprocess.Popen([sys.executable, "-c", IMPORTS], env=_letters.one_thread()) for _ in range(REPLICAS - 1)
    ]
    for child in children:
        child.wait()
    return time.monotonic() - started


def main() -> None:
    """Run and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    report: dict[str, float] = {"load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        report["limit_seconds"] = round(min(import_seconds() for _ in range(2)), 2)
        report["limit_together_seconds"] = round(together_seconds(), 2)
        runs = [scaled(folder / f"run-{number}") for number in range(options.repeat)]
    print(
        json.dumps(report | {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}, indent=1)
    )


if __name__ == "__main__":
    main()
