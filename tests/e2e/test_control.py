"""A run that is changed while it goes on: scaled, steered, suspended, interrupted. Real processes; the history tells whether all groups were trained once."""

import json
import os
import signal

import psutil
import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.local_control import connect
from tests.e2e.harness import assert_trained_once, rljob

QUIET = {"everySteps": 1000, "beforeTraining": False}


def rollouts(status):
    return next((role for role in status.get("roles", []) if role["name"] == "rollout"), {})


def spec_of(run):
    return json.loads((run.output / ".rljob/job.json").read_text())["spec"]


def test_rollouts_join_and_leave_in_mid_run_and_every_group_is_trained_once(start):
    """Also those that a rollout which leaves holds, or has finished for a later step."""
    staleness = 2
    run = start(
        pause=0.2,
        algorithm={"steps": 4000, "maxStaleness": staleness},
        rollout={"replicas": 1, "maxSequenceLength": 32},
        validation=QUIET,
    )
    run.start()
    run.at_step(2)
    scaled = rljob("scale", str(run.output), "--replicas", "3", "--env", "2")
    assert scaled.returncode == 0, scaled.stderr
    run.until(
        lambda: rollouts(run.status()).get("ready") == 3 and len(run.processes(role="env")) == 2,
        "three rollouts, two envs",
    )
    seen = run.status()
    assert rollouts(seen)["desired"] == 3 and seen["appliedGeneration"] == 1
    step = seen["step"]
    run.until(
        lambda: rollouts(status := run.status()).get("versions", {}).get(str(status.get("policyVersion"))) == 3,
        "all three at the newest version",
    )
    run.at_step(step + 5)
    assert rljob("scale", str(run.output), "--replicas", "1").returncode == 0
    run.until(lambda: {p["index"] for p in run.processes(role="rollout")} == {0}, "the end of the drained pods")
    states = {m["name"]: m["state"] for m in run.status()["members"]}
    assert states["rollout:1"] == states["rollout:2"] == "drained"
    run.until(lambda: (rollout := rollouts(run.status()))["desired"] == rollout["ready"] == 1, "one rollout is wanted")
    run.at_step(run.status()["step"] + 3)
    last = run.end_soon()
    assert_trained_once(run, steps=last, groups=4, staleness=staleness)
    assert run.status()["failures"] == {} and {line["epoch"] for line in run.lines("ledger.jsonl")} == {0}
    assert rljob("scale", str(run.output), "--replicas", "2").returncode == 2


def test_learning_rate_and_steps_change_at_a_step_boundary_and_other_fields_are_refused_by_name(start):
    run = start(algorithm={"steps": 4000}, validation=QUIET)
    run.start()
    run.at_step(2)
    spec = spec_of(run)
    with pytest.raises(
        ConfigError, match=r"spec\.rollout\.sampling\.temperature cannot change while the job runs, got 0\.5"
    ):
        connect(run.output).change(
            2, {**spec, "rollout": {**spec["rollout"], "sampling": {"temperature": 0.5, "maxNewTokens": 12}}}
        )
    spec["actor"]["optimizer"]["learningRate"] = 2.5e-4
    assert connect(run.output).change(3, spec)
    run.until(lambda: run.status()["appliedGeneration"] == 3, "the new generation")
    step = run.status()["step"]
    assert connect(run.output).change(
        2, {**spec, "algorithm": {**spec["algorithm"], "steps": 1}}
    )  # an older one: not taken
    run.at_step(step + 3)
    spec["algorithm"]["steps"] = last = run.live_step() + 20
    assert connect(run.output).change(4, spec)
    assert run.wait() == 0, run.text + run.logs()
    assert run.status()["totalSteps"] == last == run.status()["step"]
    rates = {line["step"]: line["train/lr"] for line in run.lines("metrics.jsonl") if line["step"]}
    assert rates[1] == rates[2] == 1.0e-3 and rates[last] == rates[step + 2] == 2.5e-4
    assert_trained_once(run, steps=last, groups=4)
    assert (run.output / f"checkpoints/step-{last:08d}/manifest.json").is_file()


def test_sigterm_at_the_actor_pod_saves_and_ends_with_3_and_the_next_epoch_goes_on_from_there(start):
    run = start(algorithm={"steps": 4000}, checkpoint={"everySteps": None}, validation=QUIET)
    run.start()
    run.at_step(3)
    supervisor = next(p for p in run.processes(role="supervisor") if p["pod"] == "tiny-actor-0")
    os.kill(supervisor["pid"], signal.SIGTERM)
    run.until(lambda: any(line["epoch"] == 1 for line in run.lines("ledger.jsonl")), "a step of the next epoch")
    assert not psutil.pid_exists(supervisor["pid"])
    saved = sorted((run.output / "checkpoints").glob("step-*"))
    assert saved and not list(run.output.glob("*.lost.jsonl")), (
        "a step was trained after the checkpoint that was resumed"
    )
    last = run.end_soon()
    assert_trained_once(run, steps=last, groups=4)


def test_in_a_cluster_a_missing_rollout_is_waited_for_without_a_bound_and_told(start):
    """A rollout that is frozen past every deadline of a local run: the job waits as Degraded, says for whom, and goes on."""
    deadlines = {"heartbeat": 1.0, "suspect": 4.0, "lost": 10.0, "rollout": 25.0, "degraded": 5.0}
    run = start(
        algorithm={"steps": 4000},
        rollout={"replicas": 1, "maxSequenceLength": 32},
        runtime={"deadlines": deadlines},
        validation=QUIET,
    )
    run.env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    run.start()
    run.at_step(2)
    frozen = run.processes(role="rollout")[0]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    missing = lambda: [entry for entry in run.status().get("missing", []) if entry["since"] > deadlines["rollout"] + 5]  # noqa: E731
    told = run.until(missing, "a wait longer than the deadlines")
    assert [(entry["name"], entry["pod"]) for entry in told] == [("rollout:0", "tiny-rollout-0")]
    status = run.status()
    assert status["phase"] == "Degraded" and (status["stall"] or {}).get("reason", "WaitingForPods") == "WaitingForPods"
    os.kill(frozen, signal.SIGCONT)
    run.at_step(status["step"] + 3)
    last = run.end_soon()
    assert_trained_once(run, steps=last, groups=4)
    assert {line["epoch"] for line in run.lines("ledger.jsonl")} == {0}
