"""`rollout.engine: sglang` in a whole run, with the real engine on a CPU."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import assert_nothing_left, assert_trained_once

pytestmark = pytest.mark.xdist_group("sglang")  # each test looks at the shared memory of all engines of the machine


def engines(run, of=None):
    """Return the living processes of engines; `of`: the process of one worker (None: all)."""
    found = [entry["pid"] for entry in run.processes(role="engine") if psutil.pid_exists(entry["pid"])]
    below = found if of is None else [child.pid for child in psutil.Process(of).children(recursive=True)]
    return [pid for pid in found if pid in below]


def proofs(run):
    return [member["weightsProof"] for member in run.status().get("members", []) if member["role"] == "rollout"]


def files(pids):
    """Return the files of engines in shared memory whose worker was one of these processes; another run may go on beside this one."""
    return [path.name for path in Path("/dev/shm").glob("sglang_loads_rljob-*") if int(path.name.split("-")[2]) in pids]


def test_a_colocated_run_takes_turns_with_an_engine_in_a_process_of_its_own(start):
    """On a CPU the engine only rests while the actor works; all else is as on a device: turns, proof on waking, no process left.

    Its scheduler is killed while the devices are in use for generating. The worker ends with it and starts no other: the trainer may have
    the devices by then; its successor joins in the rollouts' turn.
    """
    run = start(
        algorithm={"steps": 8},
        placement={"mode": "colocated"},
        rollout={"engine": "sglang", "replicas": 1, "maxBatch": 16},
        validation={"everySteps": 2},
    )
    run.start()
    run.at_step(1)
    run.until(lambda: proofs(run) == ["engine tensors"], "a proof")
    pids, owned = [entry["pid"] for entry in run.processes()], engines(run)
    assert len(owned) == 3
    run.until_devices_are_for("generating")
    os.kill(owned[1], signal.SIGKILL)
    run.until(lambda: len(set(engines(run)) - set(owned)) == 3, "another engine")
    pids += [entry["pid"] for entry in run.processes()]
    assert run.wait() == 0, run.text + run.logs()
    assert run.status()["devices"]["token"] > 8 and run.status()["epoch"] == 0
    assert run.status()["failures"] == {"rollout/lost": 1}
    log = (run.output / "logs/actor-0.log").read_text()
    assert (
        "this process ends, its engine cannot be had: the engine is lost and may not start here again: its process"
        in log
    )
    assert_trained_once(run, steps=8, groups=4)
    assert run.lines("metrics.jsonl")[-1]["weights/content_check_passed_total"] > 0
    assert_nothing_left(run, pids)
    assert files(pids) == [], "in memory"


def test_a_run_learns_with_two_engines_in_a_pod_of_which_one_hangs_and_the_other_loses_its_worker(start):
    """Generation runs ahead and goes on over each update with the keys and values it has. Weights are proven at both engines.

    The scheduler of the first engine stops while it generates: its worker notices by a deadline, kills the engine and starts another. Then
    the worker of the second engine is killed: the supervisor starts another, in the same pod. Each time the trainer goes on with the other
    engine, and no process of that is touched. No process of any of them is left.
    """
    run = start(
        algorithm={
            "steps": 400,
            "promptsPerStep": 8,
            "groupSize": 8,
            "maxStaleness": 1,
            "loss": {"name": "decoupled_ppo"},
        },
        actor={"optimizer": {"learningRate": 5.0e-3}},
        rollout={"engine": "sglang", "replicas": 1, "maxBatch": 64, "engineArgs": {"dp_size": 2}},
        weights={"onUpdate": "keep_kv"},
        runtime={"deadlines": {"engineSilence": 20}},
        checkpoint={"everySteps": None},
        pause=0.5,
    )
    run.start()
    run.until(lambda: proofs(run) == ["engine tensors"] * 2, "proofs at both engines")
    run.at_step(2)
    assert {member["pod"] for member in run.status()["members"] if member["role"] == "rollout"} == {"tiny-rollout-0"}
    workers = {entry["rank"]: entry["pid"] for entry in run.processes(role="rollout")}
    first, second = (engines(run, of=workers[rank]) for rank in (0, 1))
    assert len(first) == len(second) == 3, "the child, its scheduler and its detokenizer"
    os.kill(first[1], signal.SIGSTOP)
    run.until(lambda: len(set(engines(run, of=workers[0])) - set(first)) == 3, "another engine")
    assert engines(run, of=workers[1]) == second, "the other engine stayed"
    again = engines(run, of=workers[0])
    run.kill(role="rollout", rank=1)
    other = run.until(lambda: [p for p in run.processes(role="rollout", rank=1) if p["pid"] != workers[1]], "a worker")
    run.until(lambda: len(engines(run, of=other[0]["pid"])) == 3, "its engine")
    run.until(lambda: proofs(run) == ["engine tensors"] * 2, "proofs at both engines")
    assert engines(run, of=workers[0]) == again, "the other engine stayed"
    pids = [entry["pid"] for entry in run.processes()]
    last = run.end_soon()
    assert_trained_once(run, steps=last, groups=8, staleness=1)
    assert workers[0] in pids, "the worker stayed"
    assert_nothing_left(run, [*pids, *first, *second])
    assert files(pids) == [], "in memory"
    lines = [line for line in run.lines("metrics.jsonl") if line["step"]]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards
    assert lines[-1]["weights/content_check_passed_total"] > 0
    assert run.status()["epoch"] == 0 and run.status()["failures"] == {"rollout/lost": 1}
