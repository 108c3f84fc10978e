"""GRPO through `rljob run` beside TRL's GRPOTrainer: same tokenizer, weights, prompts, sampling, optimizer. Prints JSON.

Ours is the real command: launcher, supervisors, runner, channel, actor, env and 1 (and 2) rollouts as processes with sockets
between them. TRL is one process. Float32, one thread per process. The sides of a seed run interleaved, so that all meet the
same machine: one goes on for a slice of time while the others are frozen (SIGSTOP). A step's seconds are from the end of one
step to the end of the next, everything between included; steps that a freeze fell into are left out. `limit_ms` is the time
that the matrix products of generation and training take at this size in one process. TRL shuffles prompts in its own order.

    python benchmarks/trl_side_by_side.py [--quick] [--size recipe|million] [--seeds N] [--steps N] [--rollouts 1 2] [--keep DIR]

At the size of the recipe a step is mostly the cost of messages between processes, which TRL does not have; `million` shows what is
left of it at a million parameters.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import _letters
import yaml
from _processes import RLJOB, Watched, read_lines

WARM_UP_STEPS = 5
RUN_SECONDS = 900
SLICE_SECONDS = {"nothing": 1.0, "recipe": 1.0, "million": 10.0}
"""How long a side runs alone: several steps."""
SLICES_PER_SAMPLE = 4
"""Slices between looks at the memory of a frozen side."""
THAW_SECONDS = 0.1
"""Left out after a thaw: caches are cold."""
GOAL = 0.95
WINDOW = 5
"""Steps over which the reward is averaged before it is held against the goal."""
OUR_PARTS = {
    "generation": "time/rollout",
    "train": "time/train",
    "log_probs_and_backward": "time/forward_backward",
    "optimizer": "time/optimizer",
    "sync": "time/sync",
}
PATIENT = {"deadlines": {"suspect": 300.0, "lost": 600.0, "rpc": 600.0}}
"""Frozen processes miss no deadline."""


@dataclass
class Side:
    """One run of one seed."""

    watched: Watched
    steps: Callable[[], int]
    """Steps done so far."""
    ends: Callable[[], list[float]]
    """When each step so far ended, seconds since the epoch."""
    results: Callable[[], tuple[list[float], dict[str, list[float]]]]
    """The rewards by step, and the seconds of parts by step."""
    slices: list[tuple[float, float]] = field(default_factory=list)
    """When it ran alone."""

    @property
    def running(self) -> bool:
        """Return whether the run goes on."""
        return self.watched.process.poll() is None


def ours(folder: Path, seed: int, steps: int, rollouts: int, size: str, *, rljob: str = RLJOB, name: str = "") -> Side:
    """Start `rljob run`, of this tree or of another whose command is `rljob`; `name` tells sides of one kind apart."""
    name = f"{name}{rollouts}"
    output, job = folder / f"rljob-{name}", folder / f"job-{name}.yaml"
    document = _letters.job_document(
        folder, seed=seed, steps=steps, rollouts=rollouts, size=_letters.SIZES[size], runtime=PATIENT
    )
    job.write_text(yaml.safe_dump(document))
    command = [rljob, "run", str(job), "--output", str(output), "--no-progress"]

    def results() -> tuple[list[float], dict[str, list[float]]]:
        lines = [line for line in read_lines(output / "metrics.jsonl") if line["step"] > 0]
        parts = {part: [line[name] for line in lines] for part, name in OUR_PARTS.items()}
        return [line["reward/mean"] for line in lines], parts

    watched = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / f"rljob-{name}.txt", sampled=False)
    return Side(
        watched, lambda: len(read_lines(output / "metrics.jsonl")), lambda: step_ends(output / "tensorboard"), results
    )


def step_ends(folder: Path) -> list[float]:
    """Return when each training step was logged."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(folder.iterdir()) if folder.exists() else []
    events = [event for path in files for event in EventFileLoader(str(path)).Load()]
    return [
        event.wall_time
        for event in events
        if event.step > 0 and any(value.tag == "policy_version" for value in event.summary.value)
    ]


def trl(folder: Path, seed: int, steps: int, size: str) -> Side:
    """Start the GRPOTrainer."""
    report, told = folder / "trl.json", folder / "trl-steps.txt"
    script = Path(__file__).with_name("_trl_run.py")
    command = [sys.executable, str(script), str(folder), str(report), "--seed", str(seed), "--steps", str(steps)]
    command += ["--size", size]

    def results() -> tuple[list[float], dict[str, list[float]]]:
        found = json.loads(report.read_text())
        parts = found["parts"]
        both = [forward + backward for forward, backward in zip(parts["forward"], parts["backward"], strict=True)]
        return found["rewards"], {"generation": parts["generation"], "log_probs_and_backward": both}

    def ends() -> list[float]:
        return [float(line) for line in told.read_text().split("\n")[:-1]] if told.exists() else []

    watched = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / "trl.txt", sampled=False)
    return Side(watched, lambda: len(ends()), ends, results)


def interleave(sides: list[Side], slice_seconds: float) -> None:
    """Run all sides to their end, one at a time, a slice each in turn."""
    warming = list(sides)
    while warming:
        for side in [side for side in warming if side.steps() >= WARM_UP_STEPS or not side.running]:
            side.watched.freeze()
            warming.remove(side)
        time.sleep(0.02)
    while live := [side for side in sides if side.running]:
        for side in live:
            started = time.time()
            side.watched.thaw()
            while side.running and time.time() < started + slice_seconds:
                time.sleep(0.05)
            side.watched.freeze()
            side.slices.append((started + THAW_SECONDS, time.time()))
            if len(side.slices) % SLICES_PER_SAMPLE == 1:
                side.watched.sample()
    for side in sides:
        side.watched.wait(RUN_SECONDS)


def whole_steps(side: Side) -> tuple[list[int], list[float]]:
    """Return the numbers (from 0) and seconds of the steps that no freeze fell into."""
    found = [
        (number, end - start)
        for number, (start, end) in enumerate(itertools.pairwise(side.ends()), start=1)
        if any(first <= start and end <= last for first, last in side.slices)
    ]
    return [number for number, _ in found], [seconds for _, seconds in found]


def summary(side: Side) -> dict:
    """Return the figures of one run; milliseconds are medians."""
    rewards, parts = side.results()
    numbers, seconds = whole_steps(side)
    smooth = [statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in range(WINDOW, len(rewards) + 1)]
    reached = next((index + WINDOW for index, reward in enumerate(smooth) if reward >= GOAL), None)
    return {
        "seconds": seconds,
        "step_ms": milliseconds(seconds),
        "step_p90_ms": round(1e3 * statistics.quantiles(seconds, n=10)[-1], 1),
        **{f"{name}_ms": milliseconds([values[number] for number in numbers]) for name, values in parts.items()},
        "reward_last": round(smooth[-1], 4),
        "goal_reached_at_step": reached,
        "reward_area_under_curve": round(statistics.fmean(rewards), 4),
        "peak_memory_mb": round(side.watched.peak_pss_mb),
    }


def milliseconds(values: list[float]) -> float:
    """Return the median."""
    return round(1e3 * statistics.median(values), 1)


def limit_ms(size: _letters.Size) -> dict[str, float]:
    """Return the time of the matrix products alone: the decode loop of all rows, and one forward and backward pass."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    hidden, middle = size.hidden, size.intermediate
    layer = [(hidden, 2 * hidden), (hidden, hidden), (hidden, 2 * middle), (middle, hidden)]
    shapes = [*layer * size.layers, (hidden, _letters.VOCABULARY)]
    weights = [torch.randn(out, inner) for inner, out in shapes]

    def products(tokens: int, times: int) -> float:
        inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]
        started = time.perf_counter()
        for _ in range(times):
            for given, weight in zip(inputs, weights, strict=True):
                functional.linear(given, weight)
        return time.perf_counter() - started

    with torch.inference_mode():
        length = _letters.PROMPT_LENGTH + size.max_new_tokens
        decode = min(products(size.rows, size.max_new_tokens) for _ in range(10))
        train = 3 * min(products(size.rows * length, 1) for _ in range(10))
    return {"generation": round(1e3 * decode, 2), "log_probs_and_backward": round(1e3 * train, 2)}


def combine(runs: list[dict]) -> dict:
    """Return the figures of one side over all seeds."""
    seconds = [step for run in runs for step in run.pop("seconds")]
    names = [name for name in runs[0] if name.endswith(("_ms", "_mb", "_curve"))]
    return {
        **{name: round(statistics.median(run[name] for run in runs), 4) for name in names},
        "step_ms": milliseconds(seconds),
        "steps_measured": len(seconds),
        "goal_reached_at_step": [run["goal_reached_at_step"] for run in runs],
        "reward_last": [run["reward_last"] for run in runs],
        "seeds": runs,
    }


def main() -> None:
    """Run all sides of every seed and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 80 steps, one rollout")
    parser.add_argument("--size", choices=_letters.SIZES, default="recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.rollouts = 1, 80, options.rollouts[:1]
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(compare(options, options.keep or Path(scratch)), indent=1))


def compare(options: argparse.Namespace, folder: Path) -> dict:
    """Return both sides' figures and their ratio."""
    found: dict[str, list[dict]] = {}
    loads = []
    for seed in range(options.seeds):
        place = folder / f"seed-{seed}"
        _letters.make_task(place, seed, _letters.SIZES[options.size])
        sides = {"trl": trl(place, seed, options.steps, options.size)} | {
            f"ours_{count}_rollout": ours(place, seed, options.steps, count, options.size) for count in options.rollouts
        }
        try:
            interleave(list(sides.values()), SLICE_SECONDS[options.size])
        finally:
            for side in sides.values():
                side.watched.end()
        loads.append(round(os.getloadavg()[0], 1))
        for name, side in sides.items():
            found.setdefault(name, []).append(summary(side))
        print(f"seed {seed}: { {name: runs[-1]['step_ms'] for name, runs in found.items()} }", file=sys.stderr)
    report = {name: combine(runs) for name, runs in found.items()}
    ratios = {
        f"{name}_over_trl": round(report[name]["step_ms"] / report["trl"]["step_ms"], 3)
        for name in report
        if name != "trl"
    }
    limit = limit_ms(_letters.SIZES[options.size])
    return {
        "size": options.size,
        "steps": options.steps,
        "goal": GOAL,
        "load": loads,
        **ratios,
        "limit_ms": limit,
        **report,
    }


if __name__ == "__main__":
    main()
