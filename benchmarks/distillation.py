"""Steps until the student is within 5 % of the teacher's accuracy: distillation beside GRPO, three seeds. Prints JSON.

Per seed `prepare.py` of examples/arithmetic makes the student and, unspoiled, the teacher. Then `rljob run` trains the student for the same
number of steps with examples/distillation/job.yaml (4 completions per prompt) and with examples/arithmetic/job.yaml (GRPO, 8 completions
per prompt), both as they are in the repository apart from seed, steps, validation and learning rate, which is the same for both. `limit` is
the teacher's accuracy.

    python benchmarks/distillation.py [--seeds N] [--steps N] [--every N] [--learning-rate R] [--group-size N]
        [--optimizer-steps N] [--quick] [--keep DIR]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _processes import RLJOB, Watched, read_lines
from quickstart import prepare

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN_SECONDS = 1800
SHARE = 0.95
"""Share of the teacher's accuracy that is to be reached."""


def train(job: Path, folder: Path, seed: int, options: argparse.Namespace, **changes: int) -> dict[str, Any]:
    """Run `job` with `changes` on the models in `folder`; return accuracies by step, and what the steps took."""
    output = folder / f"out-{job.stem}"
    settings = {
        "algorithm.seed": seed,
        "algorithm.steps": options.steps,
        "validation.everySteps": options.every,
        "actor.optimizer.learningRate": options.learning_rate,
    } | changes
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [RLJOB, "run", str(job), "--output", str(output), "--no-progress", *chosen]
    watched = Watched(command, cwd=folder, env=os.environ, log=folder / f"{job.stem}.txt")
    seconds = watched.wait(RUN_SECONDS)
    lines = read_lines(output / "metrics.jsonl")
    return {
        "accuracy_by_step": {line["step"]: round(line["val/accuracy"], 4) for line in lines if "val/accuracy" in line},
        "completions_per_step": round(lines[-1]["rollout/total_turns"]),
        "step_seconds": round(sum(line.get("time/step", 0.0) for line in lines) / options.steps, 2),
        "run_seconds": round(seconds, 1),
    }


def steps_until(found: dict[str, Any], accuracy: float) -> int | None:
    """Return the first step whose validation reaches `accuracy`; None if none does."""
    return next((step for step, value in found["accuracy_by_step"].items() if value >= accuracy), None)


def one_seed(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one seed."""
    quick = ["--quick"] if options.quick else []
    _, before = prepare(folder / "student", seed, *quick)
    _, teacher = prepare(folder / "teacher", seed, "--unspoiled", *quick)
    shutil.copy(EXAMPLES / "distillation" / "job.yaml", folder / "distillation.yaml")
    shutil.copy(EXAMPLES / "arithmetic" / "job.yaml", folder / "student" / "grpo.yaml")
    jobs = {"distillation": folder / "distillation.yaml", "grpo": folder / "student" / "grpo.yaml"}
    both = {"algorithm.optimizerStepsPerBatch": options.optimizer_steps} if options.optimizer_steps else {}
    changes = {"distillation": {"algorithm.groupSize": options.group_size} if options.group_size else {}}
    runs = {name: train(job, folder, seed, options, **both, **changes.get(name, {})) for name, job in jobs.items()}
    steps = {name: steps_until(found, SHARE * teacher) for name, found in runs.items()}
    for name in runs:
        print(f"seed {seed}: {name} reached {SHARE * teacher:.3f} at step {steps[name]}", file=sys.stderr)
    return {
        "seed": seed,
        "student_accuracy": before,
        "teacher_accuracy": teacher,
        "steps_until_within_5_percent": steps,
        **runs,
    }


def main() -> None:
    """Run the seeds and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="steps between two validations")
    parser.add_argument("--learning-rate", type=float, default=3.0e-4)
    parser.add_argument(
        "--group-size", type=int, help="completions per prompt of the distillation; default: the example's"
    )
    parser.add_argument("--optimizer-steps", type=int, help="per batch, of both jobs; default: the examples'")
    parser.add_argument("--quick", action="store_true", help="models of 0.25M parameters")
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        seeds = [one_seed(folder / f"seed-{seed}", seed, options) for seed in range(options.seeds)]
    limit = [one["teacher_accuracy"] for one in seeds]
    print(json.dumps({"cores": os.cpu_count(), "steps": options.steps, "limit": limit, "seeds": seeds}, indent=1))


if __name__ == "__main__":
    main()
