"""Who waits for whom under bounded staleness: simulated time with lognormal lengths, and the quickstart on this machine. Prints JSON.

    python benchmarks/asynchronous.py [--real MODEL_AND_DATA] [--steps N] [--plot docs/asynchronous.svg]

`simulated`: the real account and admission in simulated time (tests/unit/runner/schedules.py). A group takes as long as the longest of 8
samples of lognormal length (sigma 1), cut at 10 medians as maxNewTokens does; 64 groups per step, two rollouts of 16 groups at a time.
`trainer` is the time of a training step as a share of the time in which the rollouts generate a step's groups when they never wait.
`go_on` is a version that does not interrupt generation, `drain` one that waits for what is in flight (weights.onUpdate wait): the trainer
goes on a little after the first rollout has it. `8 rollouts` has the same number of slots, four each. `limit` is what is possible: the
slower side busy all the time.
`--plot` draws the busy shares by bound, and the ages of what was trained, into an SVG, and prints nothing else.
`real`: medians of `rljob run` of job.yaml and asynchronous.yaml of examples/arithmetic, one after the other, with one rollout: engine and
trainer have a core each and cost about the same. `asynchronous over on policy` is the ratio of the step times.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from _processes import RLJOB  # noqa: E402

from tests.unit.runner.schedules import Schedule  # noqa: E402

PROMPTS, SLOTS, ROLLOUTS, SAMPLES, LONGEST = 64, 32, 2, 8, 10.0
STEPS = 100
GRACE = 0.05
"""Time from the first rollout that has a version to its commit, in medians of a sample's length."""


def group_seconds(rng: Random) -> float:
    """Return the time of a group: that of its longest sample."""
    return min(max(rng.lognormvariate(0, 1) for _ in range(SAMPLES)), LONGEST)


def simulate(staleness: int, *, trainer: float, drain: bool, rollouts: int = ROLLOUTS) -> dict[str, float]:
    """Return who was busy for which share of a run, and the ages of what was trained."""
    rng, sample = Random(1), Random(2)
    mean = statistics.fmean(group_seconds(sample) for _ in range(20_000))
    step = PROMPTS * mean / SLOTS
    run = Schedule(
        rng,
        staleness=staleness,
        prompts=PROMPTS,
        steps=STEPS,
        rollouts=rollouts,
        slots=SLOTS // rollouts,
        seconds=lambda: group_seconds(rng),
        train_seconds=lambda: trainer * step,
        publish_seconds=GRACE if drain else 0.0,
        drain=drain,
    ).run()
    assert run.finished and run.stale == 0
    ages = list(run.trained.values())
    return {
        "rollout_busy": round(run.rollout_busy / (run.now * SLOTS), 3),
        "trainer_busy": round(run.trainer_busy / run.now, 3),
        "step_over_generation": round(run.now / STEPS / step, 3),
        "age_mean": round(statistics.fmean(ages), 2),
        "age_max": max(ages),
    }


def real(folder: Path, steps: int) -> dict[str, Any]:
    """Return medians over the steps of both examples after the first few, on the model and data in `folder`."""
    found: dict[str, Any] = {}
    for name in ("job", "asynchronous"):
        job = folder / f"{name}.yaml"
        job.write_text((ROOT / "examples" / "arithmetic" / f"{name}.yaml").read_text())
        with tempfile.TemporaryDirectory() as output:
            command = [RLJOB, "run", str(job), "--output", output, "--no-progress"]
            chosen = ["--set", f"algorithm.steps={steps}", "--set", "rollout.replicas=1"]
            subprocess.run([*command, *chosen], check=True, stdout=sys.stderr)
            lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
        late = [line for line in lines if line["step"] > 5]
        found[name] = {
            key: round(statistics.median(line[key] for line in late if key in line), 4)
            for key in ("time/step", "time/rollout", "time/train", "time/sync", "train/staleness_mean", "val/accuracy")
        }
        found[name]["val/accuracy"] = lines[-1]["val/accuracy"]
    ratio = found["asynchronous"]["time/step"] / found["job"]["time/step"]
    return found | {"asynchronous over on policy": round(ratio, 3)}


BOUNDS, PLOTTED = (0, 1, 2, 3, 4), 0.9
"""Bounds in the plot, and the trainer's time as a share of generation's."""
WIDTH, HEIGHT, LEFT, TOP = 250, 150, 45, 40
STYLE = "font-family='sans-serif' font-size='11'"


def svg() -> str:
    """Return the plot: two panels of lines over the bound, busy shares and ages."""
    runs = {drain: [simulate(s, trainer=PLOTTED, drain=drain or not s) for s in BOUNDS] for drain in (False, True)}
    busy = [
        ("rollouts, abort_resume", "#1f77b4", "", [run["rollout_busy"] for run in runs[False]]),
        ("rollouts, wait", "#1f77b4", "5,4", [run["rollout_busy"] for run in runs[True]]),
        ("trainer, abort_resume", "#d62728", "", [run["trainer_busy"] for run in runs[False]]),
        ("trainer, wait", "#d62728", "5,4", [run["trainer_busy"] for run in runs[True]]),
    ]
    ages = [
        ("bound", "#999999", "2,3", [float(bound) for bound in BOUNDS]),
        ("oldest, abort_resume", "#2ca02c", "", [run["age_max"] for run in runs[False]]),
        ("mean, abort_resume", "#9467bd", "", [run["age_mean"] for run in runs[False]]),
        ("mean, wait", "#9467bd", "5,4", [run["age_mean"] for run in runs[True]]),
    ]
    panels = panel(0, "share of time at work", busy, top=1.0) + panel(
        WIDTH + 2 * LEFT, "age of trained groups", ages, top=4.0
    )
    size = f"width='{2 * WIDTH + 4 * LEFT}' height='{HEIGHT + TOP + 110}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>\n<rect width='100%' height='100%' fill='white'/>\n{panels}</svg>\n"


def panel(x: float, title: str, lines: list[tuple[str, str, str, list[float]]], *, top: float) -> str:
    """Return one panel at `x`: axes, lines (label, colour, dashes, value by bound) and a key below."""
    left, bottom = x + LEFT, TOP + HEIGHT
    found = [f"<text x='{left}' y='{TOP - 18}' {STYLE} font-weight='bold'>{title}</text>"]
    for part in range(5):
        y = bottom - HEIGHT * part / 4
        found.append(f"<line x1='{left}' x2='{left + WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#dddddd'/>")
        found.append(f"<text x='{left - 8}' y='{y + 4:.1f}' text-anchor='end' {STYLE}>{top * part / 4:g}</text>")
    places = [left + WIDTH * index / (len(BOUNDS) - 1) for index in range(len(BOUNDS))]
    for place, bound in zip(places, BOUNDS, strict=True):
        found.append(f"<text x='{place:.1f}' y='{bottom + 16}' text-anchor='middle' {STYLE}>{bound}</text>")
    found.append(
        f"<text x='{left + WIDTH / 2}' y='{bottom + 32}' text-anchor='middle' {STYLE}>algorithm.maxStaleness</text>"
    )
    for number, (label, colour, dashes, values) in enumerate(lines):
        points = " ".join(
            f"{at:.1f},{bottom - HEIGHT * value / top:.1f}" for at, value in zip(places, values, strict=True)
        )
        drawn = f"fill='none' stroke='{colour}' stroke-width='2' stroke-dasharray='{dashes or 'none'}'"
        found.append(f"<polyline points='{points}' {drawn}/>")
        y = bottom + 50 + 14 * number
        found.append(f"<line x1='{left}' x2='{left + 28}' y1='{y - 4}' y2='{y - 4}' {drawn}/>")
        found.append(f"<text x='{left + 34}' y='{y}' {STYLE}>{label}</text>")
    return "\n".join(found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--real", type=Path, help="folder that examples/arithmetic/prepare.py has filled")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot", type=Path, help="where the SVG goes")
    options = parser.parse_args()
    if options.plot is not None:
        options.plot.write_text(svg())
        return
    simulated: dict[str, object] = {}
    for trainer in (0.7, 0.9, 1.1):
        table = {"limit": {"rollout_busy": round(min(1, 1 / trainer), 3), "trainer_busy": min(1.0, trainer)}}
        table |= {f"staleness {s}, go_on": simulate(s, trainer=trainer, drain=False) for s in (1, 2, 4)}
        table |= {f"staleness {s}, drain": simulate(s, trainer=trainer, drain=True) for s in (0, 2)}
        table["staleness 2, drain, 8 rollouts"] = simulate(2, trainer=trainer, drain=True, rollouts=8)
        simulated[f"trainer {trainer}"] = table
    result: dict[str, object] = {"simulated": simulated}
    if options.real is not None:
        result["real"] = real(options.real, options.steps)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
