"""The quickstart of examples/arithmetic on fresh folders, three seeds: seconds of every part, accuracy before and after. Prints JSON.

Per seed: `prepare.py` makes model and data, `rljob run` trains the job as it is in the repository with that seed. Target: under
360 s together on two cores, validation accuracy up by at least 0.3 to at least 0.85. `limit` is accuracy 1; the peer is the
same model after supervised training on the right sums only (`--unspoiled`), which is what GRPO has to win back. On a machine
with other work the seconds say little; `cpu_seconds` (all processes of both parts) are what two free cores share.

    python benchmarks/quickstart.py [--seeds N] [--first SEED] [--steps N] [--keep DIR]
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _processes import RLJOB, Watched, read_lines

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"
SEED_SECONDS = 1800
PARTS = ("step", "rollout", "train", "sync", "validation", "checkpoint")
TARGET_SECONDS, TARGET_RISE, TARGET_ACCURACY = 360, 0.3, 0.85


def prepare(folder: Path, seed: int, *options: str) -> tuple[float, float]:
    """Make model and data; return the seconds and the model's validation accuracy."""
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--output", str(folder), "--seed", str(seed), *options]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    accuracy = re.search(r"validation accuracy ([0-9.]+)", done.stdout)
    if accuracy is None:
        raise RuntimeError(f"prepare.py must print the validation accuracy, got {done.stdout!r}")
    return time.monotonic() - started, float(accuracy[1])


def train(folder: Path, seed: int, settings: list[str]) -> dict:
    """Run the job; return what it measured."""
    shutil.copy(EXAMPLE / "job.yaml", folder)
    output = folder / "out"
    options = [part for one in [f"algorithm.seed={seed}", *settings] for part in ("--set", one)]
    command = [RLJOB, "run", str(folder / "job.yaml"), "--output", str(output), "--no-progress", *options]
    watched = Watched(command, cwd=folder, env=os.environ, log=folder / "run.txt")
    seconds = watched.wait(SEED_SECONDS)
    lines = read_lines(output / "metrics.jsonl")
    accuracy = {line["step"]: round(line["val/accuracy"], 4) for line in lines if "val/accuracy" in line}
    total = {part: round(sum(line.get(f"time/{part}", 0.0) for line in lines), 1) for part in PARTS}
    return {
        "run_seconds": round(seconds, 1),
        "start_and_end_seconds": round(seconds - total["step"] - total["validation"] - total["checkpoint"], 1),
        **{f"{part}_seconds": value for part, value in total.items()},
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[max(accuracy)],
        "accuracy_by_step": accuracy,
        "peak_memory_mb": round(watched.peak_pss_mb),
    }


def cpu_seconds() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_seed(folder: Path, seed: int, settings: list[str]) -> dict:
    """Return the figures of one seed."""
    load, used = os.getloadavg()[0], cpu_seconds()
    seconds, accuracy = prepare(folder, seed)
    found = {
        "seed": seed,
        "load_before": round(load, 1),
        "prepare_seconds": round(seconds, 1),
        "accuracy_of_model": accuracy,
    }
    found |= train(folder, seed, settings)
    found["total_seconds"] = round(seconds + found["run_seconds"], 1)
    found["cpu_seconds"], found["load_after"] = round(cpu_seconds() - used, 1), round(os.getloadavg()[0], 1)
    rise = found["accuracy_after"] - found["accuracy_before"]
    found["rise"] = round(rise, 4)
    found["reached"] = (
        found["total_seconds"] <= TARGET_SECONDS and rise >= TARGET_RISE and found["accuracy_after"] >= TARGET_ACCURACY
    )
    return found


def main() -> None:
    """Run the seeds and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, help="development: fewer GRPO steps than the job says")
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    settings = [] if options.steps is None else [f"algorithm.steps={options.steps}"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        runs = []
        for seed in range(options.first, options.first + options.seeds):
            runs.append(one_seed(folder / f"seed-{seed}", seed, settings))
            print(f"seed {seed}: {runs[-1]['total_seconds']} s, {runs[-1]['accuracy_after']}", file=sys.stderr)
        _, peer = prepare(folder / "supervised", options.first, "--unspoiled")
    target = {"seconds": TARGET_SECONDS, "rise": TARGET_RISE, "accuracy": TARGET_ACCURACY}
    report = {"cores": os.cpu_count(), "target": target, "limit": 1.0, "supervised_accuracy": peer, "seeds": runs}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
