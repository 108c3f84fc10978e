"""Environment steps per second of `rljob run` on CartPole beside a plain PPO loop, in turns, and the recovery of a simulator. Prints JSON.

Each turn trains as many updates with the same hyper-parameters in the plain loop and in each program. There are several short turns, because
the speed of a shared machine changes within a minute: `median_ratio` is the median over the turns. A run of the example has 200 updates.
`slow` is a simulator that costs 1 ms of processor time a step. `embodied_async` collects the next trajectories while it trains, one
version older.
`steps_of_two_processes_over_one` is how many times as many steps two processes make as one, just before each turn: 2 on two cores, less if
they share one. It is the limit of `slow`, and rljob needs both cores for CartPole too.
`processor_us_per_step` is the time of all processes, user and system, between the first updates and the last: it hardly depends on what else
the machine does.
Targets: 0.8 of the plain loop for CartPole, 1.2 for `slow`, 2 s from the death of one of 8 simulators to its next step.

    python benchmarks/embodied.py [--turns N] [--updates N] [--slow-updates N]
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from _processes import RLJOB, Watched, read_lines, wait_for

from rl_core.envs.gymnasium import GymnasiumVectorEnv

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "embodied"
SLOW = ("env.options.id=_slow_cartpole:SlowCartPole", "env.options.vectorization=process")
PROGRAMS = {"rljob": (), "embodied_async": ("program=embodied_async", "algorithm.maxStaleness=1")}
"""Settings of the runs that are compared with the plain loop."""
STEPS, WARM = 8 * 128, 3
"""Environment steps of an update; updates at the start of a run that are not counted."""


class Training(NamedTuple):
    """What one training told."""

    seconds: list[float]
    """Of each update."""
    returns: list[float]
    """Mean of the episodes that ended in an update, of the updates in which one did."""
    processor: float | None
    """Seconds of processor time per environment step; None where the run was too short to tell."""


def processor_seconds(run: Watched) -> float:
    """Return the processor time that the live processes of a run have taken."""
    total = 0.0
    for process in run.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def ours(folder: Path, updates: int, seed: int, slow: bool, program: tuple[str, ...]) -> Training:
    """Train by `rljob run` with the settings `program`."""
    shutil.copytree(EXAMPLE, folder)
    shutil.copy(HERE / "_slow_cartpole.py", folder)
    settings = [f"algorithm.steps={updates}", f"algorithm.seed={seed}", "validation.everySteps=100000"]
    settings += [*program, *(SLOW if slow else ())]
    options = [part for one in settings for part in ("--set", one)]
    command = [RLJOB, "run", str(folder / "cartpole.yaml"), "--output", str(folder / "out"), "--no-progress", *options]
    run = Watched(command, cwd=folder, env=os.environ, log=folder / "run.txt", sampled=False)

    def trained() -> list[dict]:
        return [line for line in read_lines(folder / "out" / "metrics.jsonl") if line["step"] > 0]

    looks = []
    for wanted in (min(WARM, updates - 2), updates - 1):
        ready = lambda wanted=wanted: len(trained()) >= wanted or run.process.poll() is not None  # noqa: E731
        wait_for(ready, timeout=1200, what=f"update {wanted}", poll=0.1)
        looks.append((processor_seconds(run), len(trained())))
    run.wait(1200)
    (begun, first), (ended, last) = looks
    lines = trained()
    returns = [line["env/return"] for line in lines if "env/return" in line]
    processor = (ended - begun) / ((last - first) * STEPS) if last > first else None
    return Training([line["time/step"] for line in lines], returns, processor)


def plain(updates: int, seed: int, slow: bool) -> Training:
    """Train by the plain loop."""
    options = {"id": "slow" if slow else "CartPole-v1", "updates": updates, "annealed": updates, "seed": seed}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(HERE / "_plain_ppo.py"), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    returns = [statistics.mean(ended) for ended in found["returns"] if ended]
    return Training(found["seconds"], returns, statistics.mean(found["processor_seconds"][WARM:]) / STEPS)


STEPPER = """
import sys, time
import numpy as np
from rl_core.envs.gymnasium import GymnasiumVectorEnv
env, actions, steps = GymnasiumVectorEnv("CartPole-v1", 8), np.zeros(8, np.int64), 0
env.reset(seed=1)
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 2.0
while time.monotonic() < end:
    env.step(actions)
    steps += 1
print(steps)
"""
"""Makes as many steps of 8 simulators as it can in 2 seconds, from the moment at which it reads a line."""


def steps_at_once(count: int) -> int:
    """Return how many steps `count` processes make together in 2 seconds."""
    command = [sys.executable, "-c", STEPPER]
    steppers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for stepper in steppers:
        stepper.stdout.readline()
    for stepper in steppers:
        stepper.stdin.write("go\n")
        stepper.stdin.flush()
    return sum(int(stepper.communicate()[0]) for stepper in steppers)


def compare(folder: Path, turns: int, updates: int, *, slow: bool) -> dict:
    """Return steps per second, processor time per step, last returns, the ratio to the plain loop's speed, and its limit, by turn."""
    names = ("plain", *PROGRAMS)
    rates: dict[str, list[float]] = {name: [] for name in names}
    returns: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float | None]] = {name: [] for name in names}
    two_over_one: list[float] = []
    for turn in range(turns):
        two_over_one.append(round(steps_at_once(2) / steps_at_once(1), 2))
        for name in names:
            parts = folder / f"{name}-{slow}-{turn}"
            done = plain(updates, turn, slow) if name == "plain" else ours(parts, updates, turn, slow, PROGRAMS[name])
            rates[name].append(STEPS / statistics.mean(done.seconds[WARM:]))
            returns[name].append(statistics.mean(done.returns[-5:]))
            processor[name].append(None if done.processor is None else round(1e6 * done.processor, 1))
    ratios = {
        name: [round(mine / theirs, 3) for mine, theirs in zip(rates[name], rates["plain"], strict=True)]
        for name in PROGRAMS
    }
    return {
        "environment_steps": updates * STEPS,
        "steps_per_second": {name: [round(rate) for rate in each] for name, each in rates.items()},
        "ratio": ratios,
        "median_ratio": {name: round(statistics.median(ratios[name]), 3) for name in PROGRAMS},
        "steps_of_two_processes_over_one": two_over_one,
        "processor_us_per_step": processor,
        "return_of_last_5_updates": {name: [round(one, 1) for one in each] for name, each in returns.items()},
    }


def recovery(count: int = 8) -> dict:
    """Kill one of `count` simulators; return the seconds to its next step and the episodes that were lost."""
    env = GymnasiumVectorEnv("CartPole-v1", count, vectorization="process")
    try:
        env.reset(seed=1)
        actions = np.zeros(count, np.int64)
        env.step(actions)
        os.kill(env._slots.pids[3], signal.SIGKILL)
        killed, lost, output = time.monotonic(), 0, None
        while output is None or not lost or output.sub_steps[3] == 0:
            output = env.step(actions)
            lost += 0 if output.lost is None else int(output.lost.sum())
        return {"seconds_to_next_step": round(time.monotonic() - killed, 2), "lost_episodes": lost}
    finally:
        env.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--slow-updates", type=int, default=5)
    options = parser.parse_args()
    if min(options.updates, options.slow_updates) <= WARM:
        parser.error(f"--updates and --slow-updates must be more than {WARM}, which are not counted")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = {
            "cores": os.cpu_count(),
            "target": {"cartpole": 0.8, "slow": 1.2, "seconds_to_next_step": 2.0},
            "recovery": recovery(),
            "cartpole": compare(folder, options.turns, options.updates, slow=False),
            "slow": compare(folder, options.turns, options.slow_updates, slow=True),
        }
    report["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
