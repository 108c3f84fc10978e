"""A policy that acts in simulators, in whole runs: a resume changes nothing of what is trained, a lost env worker costs its own episodes."""

import json
import os
import shutil
import signal
import time
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.harness import Run, rljob

STEPS = 16
SPEC = {
    "program": "embodied",
    "model": {"path": "policy"},
    "data": {"train": "none"},
    "algorithm": {"name": "gae", "critic": {"gamma": 0.99, "lam": 0.95}, "whiten": True, "steps": STEPS},
    "actor": {"optimizer": {"learningRate": 1.0e-3}},
    "rollout": {"replicas": 1},
    "env": {
        "type": "gymnasium",
        "replicas": 2,
        "options": {
            "id": "poles:Fragile",
            "numEnvs": 4,
            "horizon": 48,
            "autoReset": False,
            "vectorization": "sync",
            "evalEpisodes": 3,
        },
    },
    "validation": {"everySteps": STEPS},
    "trackers": [],
}


def begin(folder, every_steps, *, program="embodied", mode="disaggregated", **algorithm):
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("poles.py"), folder)
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text(
        json.dumps({"policy": "mlp", "arguments": {"observation_size": 4, "num_actions": 2, "hidden": [16]}})
    )
    spec = SPEC | {
        "program": program,
        "algorithm": SPEC["algorithm"] | algorithm,
        "placement": {"mode": mode},
        "checkpoint": {"everySteps": every_steps, "everySeconds": None},
        "env": SPEC["env"] | {"options": SPEC["env"]["options"] | {"kwargs": {"folder": str(folder)}}},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "poles"}, "spec": spec}
    return Run(folder, job)


OTHER_HOST = """
import ctypes, os, sys

if any(os.path.basename(word) == "env-0.json" for word in sys.orig_argv):
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
"""
"""Gives the first env pod a /dev/shm of its own, as it has on another host."""


def history(run):
    names = (
        "step",
        "env/return",
        "env/steps_total",
        "env/num_trajectories",
        "train/loss",
        "train/grad_norm",
        "val/return",
    )
    return [[line.get(name) for name in names] for line in run.lines("metrics.jsonl")]


def test_a_killed_actor_changes_no_number_and_a_killed_env_worker_costs_its_own_episodes(tmp_path):
    calm, disturbed = begin(tmp_path / "calm", 100), begin(tmp_path / "disturbed", 2)
    try:
        assert calm.run() == 0, calm.text + calm.logs()
        disturbed.start()
        disturbed.at_step(2)
        disturbed.kill(role="actor")
        (disturbed.job.parent / "armed").touch()
        assert disturbed.wait() == 0, disturbed.text + disturbed.logs()
        status = disturbed.status()
        assert status["epoch"] == 1 and status["failures"]["env/lost"] >= 1
        expected, found, lines = history(calm), history(disturbed), disturbed.lines("metrics.jsonl")
        assert [line[0] for line in expected] == [line[0] for line in found] == list(range(STEPS + 1))
        assert all(line[3] == 8 for line in expected[1:])
        lossy = [line["step"] for line in lines if line.get("env/lost_episodes")]
        assert len(lossy) == 1, lines
        step = lossy[0]
        assert found[:step] == expected[:step]
        # Each env worker has 4 simulators, which make one episode a step. The step goes on with those of the other one.
        assert lines[step]["env/lost_episodes"] == lines[step]["env/num_trajectories"] == 4
        assert lines[step]["env/repeated_collections"] == 0
        assert lines[step]["env/steps"] < expected[step][2] - expected[step - 1][2]
        assert [line[3] for line in found[step + 1 :]] == [8] * (STEPS - step)
    finally:
        for run in (calm, disturbed):
            run.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")
def test_an_env_worker_on_another_host_changes_no_number(tmp_path):
    """One of two env workers shares no memory with the rollout: its observations come by the channel, those of the other one directly."""
    together, apart = begin(tmp_path / "together", 100, steps=4), begin(tmp_path / "apart", 100, steps=4)
    (tmp_path / "apart" / "sitecustomize.py").write_text(OTHER_HOST)
    try:
        for run in (together, apart):
            assert run.run() == 0, run.text + run.logs()
        assert history(apart) == history(together)
        assert [line.get("env/repeated_collections") for line in apart.lines("metrics.jsonl")[1:]] == [0] * 4
        assert [len(list(run.job.parent.glob("shared-memory-*"))) for run in (together, apart)] == [1, 2]
    finally:
        for run in (together, apart):
            run.end()


def test_a_rollout_that_shares_the_devices_of_the_actor_changes_no_number(tmp_path):
    """They take turns, and so the rollout cannot wait for its weights while the actor trains."""
    apart, shared = (begin(tmp_path / mode, 100, mode=mode, steps=4) for mode in ("disaggregated", "colocated"))
    try:
        for run in (apart, shared):
            assert run.run() == 0, run.text + run.logs()
        assert history(shared) == history(apart)
        assert shared.status()["devices"]["token"] > 4
        # The last checkpoint has the weights that the run has exported at its end.
        written = tmp_path / "exported"
        done = rljob("export", str(shared.output), str(written))
        assert done.returncode == 0, done.stderr
        for file in ("config.json", "model.safetensors"):
            assert (written / file).read_bytes() == (shared.output / "model" / file).read_bytes()
    finally:
        for run in (apart, shared):
            run.end()


def test_a_rollout_or_env_worker_that_ends_at_any_time_restarts_no_actor(tmp_path):
    run = begin(tmp_path / "ends", 100, steps=60)
    try:
        run.start()
        for number, (role, sent) in enumerate(product(("rollout", "env"), (signal.SIGKILL, signal.SIGTERM))):
            run.at_step(5 + 12 * number)
            time.sleep(0.02 * number)  # at another moment of a step
            os.kill(run.until(lambda role=role: run.processes(role=role), f"a process {role}")[0]["pid"], sent)
        assert run.wait() == 0, run.text + run.logs()
        status = run.status()
        assert status["epoch"] == 0 and status["step"] == 60, run.text + run.logs()
        assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(61))
    finally:
        run.end()


def test_collections_ahead_of_training_are_one_version_old_and_survive_the_loss_of_a_rollout(tmp_path):
    run = begin(tmp_path / "ahead", 100, program="embodied_async", maxStaleness=1, steps=24)
    try:
        run.start()
        run.at_step(2)
        run.kill(role="rollout")
        assert run.wait() == 0, run.text + run.logs()
        lines = run.lines("metrics.jsonl")[1:]
        assert [line["step"] for line in lines] == list(range(1, 25))
        ages = [line["train/staleness_max"] for line in lines]
        # The first step collects at once, and so does one whose collection was lost.
        assert ages[0] == 0 and set(ages[1:]) <= {0, 1} and ages.count(1) >= 8
        steps = [line["env/steps_total"] for line in lines]
        assert steps == sorted(set(steps))
    finally:
        run.end()
