"""GRPO through `rljob run` beside TRL's GRPOTrainer: same tokenizer, weights, prompts, sampling, optimizer. Prints JSON.

Ours is the real command: launcher, supervisors, runner, channel, actor, env and 1 (and 2) rollouts as processes with sockets
between them. TRL is one process. Float32, one thread per process, seeds are run in turn: ours, TRL, ours with two rollouts.
A step's seconds are from the end of one step to the end of the next, everything between included. `limit_ms` is the time that
the matrix products of generation and training take at this size in one process. TRL shuffles prompts in its own order.

    python benchmarks/trl_side_by_side.py [--quick] [--seeds N] [--steps N] [--rollouts 1 2] [--keep DIR]
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import _letters
import yaml
from _processes import RLJOB, Watched, read_lines

WARM_UP_STEPS = 5
RUN_SECONDS = 900
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


def ours(folder: Path, seed: int, steps: int, rollouts: int) -> dict:
    """Run `rljob run` and return what it measured."""
    output = folder / f"rljob-{rollouts}"
    job = folder / f"job-{rollouts}.yaml"
    job.write_text(yaml.safe_dump(_letters.job_document(folder, seed=seed, steps=steps, rollouts=rollouts)))
    command = [RLJOB, "run", str(job), "--output", str(output), "--no-progress"]
    watched = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / f"rljob-{rollouts}.txt")
    seconds = watched.wait(RUN_SECONDS)
    lines = [line for line in read_lines(output / "metrics.jsonl") if line["step"] > 0]
    ends = step_ends(output / "tensorboard")
    return summary(
        [line["reward/mean"] for line in lines],
        [later - earlier for earlier, later in itertools.pairwise(ends)],
        {part: [line[name] for line in lines] for part, name in OUR_PARTS.items()},
    ) | {"peak_memory_mb": round(watched.peak_pss_mb), "run_seconds": round(seconds, 1)}


def step_ends(folder: Path) -> list[float]:
    """Return when each training step was logged, seconds since the epoch."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load()]
    return [event.wall_time for event in events if event.step > 0 and event.HasField("summary")]


def trl(folder: Path, seed: int, steps: int) -> dict:
    """Run the GRPOTrainer and return what it measured."""
    report = folder / "trl.json"
    script = Path(__file__).with_name("_trl_run.py")
    command = [sys.executable, str(script), str(folder), str(report), "--seed", str(seed), "--steps", str(steps)]
    watched = Watched(command, cwd=folder, env=_letters.one_thread(), log=folder / "trl.txt")
    seconds = watched.wait(RUN_SECONDS)
    found = json.loads(report.read_text())
    parts = found["parts"]
    both = [forward + backward for forward, backward in zip(parts["forward"], parts["backward"], strict=True)]
    return summary(
        found["rewards"], found["steps"], {"generation": parts["generation"], "log_probs_and_backward": both}
    ) | {"peak_memory_mb": round(watched.peak_pss_mb), "run_seconds": round(seconds, 1)}


def summary(rewards: list[float], steps: list[float], parts: dict[str, list[float]]) -> dict:
    """Return the figures of one run; milliseconds are medians after the warm-up."""
    smooth = [statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in range(WINDOW, len(rewards) + 1)]
    reached = next((index + WINDOW for index, reward in enumerate(smooth) if reward >= GOAL), None)
    return {
        "step_ms": milliseconds(steps),
        "step_p90_ms": round(1e3 * statistics.quantiles(steps[WARM_UP_STEPS:], n=10)[-1], 1),
        "steps": steps[WARM_UP_STEPS:],
        **{f"{name}_ms": milliseconds(values) for name, values in parts.items()},
        "reward_last": round(smooth[-1], 4),
        "goal_reached_at_step": reached,
        "reward_area_under_curve": round(statistics.fmean(rewards), 4),
    }


def milliseconds(values: list[float]) -> float:
    """Return the median after the warm-up."""
    return round(1e3 * statistics.median(values[WARM_UP_STEPS:]), 1)


def limit_ms() -> dict[str, float]:
    """Return the time of the matrix products alone: the decode loop of 32 rows, and one forward and backward pass."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    rows, hidden, middle, layers, vocabulary = 32, 64, 128, 2, 49
    sizes = [(hidden, 2 * hidden), (hidden, hidden), (hidden, 2 * middle), (middle, hidden)] * layers
    weights = [torch.randn(out, inner) for inner, out in [*sizes, (hidden, vocabulary)]]

    def products(tokens: int, times: int) -> float:
        inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]
        started = time.perf_counter()
        for _ in range(times):
            for given, weight in zip(inputs, weights, strict=True):
                functional.linear(given, weight)
        return time.perf_counter() - started

    with torch.inference_mode():
        length = _letters.PROMPT_LENGTH + _letters.MAX_NEW_TOKENS
        decode = min(products(rows, _letters.MAX_NEW_TOKENS) for _ in range(10))
        train = 3 * min(products(rows * length, 1) for _ in range(10))
    return {"generation": round(1e3 * decode, 2), "log_probs_and_backward": round(1e3 * train, 2)}


def combine(runs: list[dict]) -> dict:
    """Return the figures of one side over all seeds."""
    steps = [step for run in runs for step in run.pop("steps")]
    names = [name for name in runs[0] if name.endswith(("_ms", "_mb", "_seconds", "_curve"))]
    return {
        **{name: statistics.median(run[name] for run in runs) for name in names},
        "step_ms": round(1e3 * statistics.median(steps), 1),
        "goal_reached_at_step": [run["goal_reached_at_step"] for run in runs],
        "reward_last": [run["reward_last"] for run in runs],
        "load": [run["load"] for run in runs],
        "seeds": runs,
    }


def main() -> None:
    """Run all sides in turn for every seed and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 40 steps, one rollout")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--without-trl", action="store_true", help="development: ours only")
    parser.add_argument("--keep", type=Path, help="folder for the runs' files; default: a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.rollouts = 1, 40, options.rollouts[:1]
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(compare(options, options.keep or Path(scratch)), indent=1))


def compare(options: argparse.Namespace, folder: Path) -> dict:
    """Return both sides' figures and their ratio."""
    first, *others = options.rollouts
    sides = {f"ours_{first}_rollout": lambda *run: ours(*run, first)}
    if not options.without_trl:
        sides["trl"] = trl
    sides |= {f"ours_{count}_rollouts": lambda *run, count=count: ours(*run, count) for count in others}
    found: dict[str, list[dict]] = {name: [] for name in sides}
    for seed in range(options.seeds):
        _letters.make_task(folder / f"seed-{seed}", seed)
        for name, run in sides.items():
            load = round(os.getloadavg()[0], 1)
            found[name].append(run(folder / f"seed-{seed}", seed, options.steps) | {"load": load})
            print(f"{name} seed {seed}: {found[name][-1]['step_ms']} ms per step", file=sys.stderr)
    report = {name: combine(runs) for name, runs in found.items()}
    ratios = (
        {
            f"{name}_over_trl": round(report[name]["step_ms"] / report["trl"]["step_ms"], 3)
            for name in report
            if name != "trl"
        }
        if "trl" in report
        else {}
    )
    return {"steps": options.steps, "goal": GOAL, **ratios, "limit_ms": limit_ms(), **report}


if __name__ == "__main__":
    main()
