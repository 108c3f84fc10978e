"""A run that must go while it trains: what is saved is the last finished step, and the resumed run trains every group once."""

import os
import signal

from rl_core.cli.local_control import connect
from tests.e2e.harness import assert_trained_once

QUIET = {"everySteps": 1000, "beforeTraining": False}
LONG = {
    "algorithm": {"promptsPerStep": 8, "groupSize": 64, "steps": 4000},
    "actor": {"microBatchTokens": 32, "optimizer": {"learningRate": 1.0e-3}},
    "checkpoint": {"everySteps": None},
    "failurePolicy": {"maxRestarts": 0},
    "validation": QUIET,
}
"""Training a step takes hundreds of micro-batches of one or two rows."""
IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
"""Makes processes take this for a cluster, where an actor's pod is told to go apart from the others."""


def step_in_training(run):
    """Return the last finished step, seen when the training of the next one has just begun."""
    run.at_step(1)
    ask = connect(run.output).status
    looks = lambda: ask() or {}  # noqa: E731
    run.until(lambda: looks().get("phase") not in (None, "Training"), "the end of a training")
    seen = run.until(lambda: (status := looks()).get("phase") == "Training" and status, "the training of a step")
    return seen["step"]


def terminate(run, pod):
    supervisor = next(p for p in run.processes(role="supervisor") if p["pod"] == pod)
    os.kill(supervisor["pid"], signal.SIGTERM)


def saved_steps(run):
    return sorted(int(path.name.partition("-")[2]) for path in (run.output / "checkpoints").glob("step-*"))


def assert_left_after(run, step):
    """The step in training was not finished: neither its groups nor its weights count, and what is saved is the one before."""
    assert run.status()["step"] == step and saved_steps(run) == [step], run.text + run.logs()
    assert {line["step"] for line in run.lines("ledger.jsonl")} == set(range(1, step + 1))
    assert f"step {step + 1} is cancelled" in (run.output / "logs/actor-0.log").read_text()


def assert_resumes_exactly(run, step):
    """One more step, in whole batches, goes on from what was saved and trains each of its groups once."""
    changes = (f"algorithm.steps={step + 1}", "actor.microBatchTokens=4096", "failurePolicy.maxRestarts=3")
    assert run.run("--resume", "auto", *(word for change in changes for word in ("--set", change))) == 0, run.logs()
    assert_trained_once(run, steps=step + 1, groups=8)
    assert not list(run.output.glob("*.lost.jsonl")), "a step was trained after the checkpoint that was resumed"


def test_sigterm_at_another_actor_pod_makes_the_whole_gang_leave_the_step_and_the_runner_save(start):
    run = start(**LONG | {"actor": {**LONG["actor"], "replicas": 2}})
    run.env |= IN_CLUSTER
    run.start()
    step = step_in_training(run)
    terminate(run, "tiny-actor-1")
    assert run.wait() == 3, run.text + run.logs()
    assert_left_after(run, step)
    assert run.status()["failure"]["message"].startswith("SIGTERM at actor:1")
    assert_resumes_exactly(run, step)


def test_ctrl_c_in_mid_training_leaves_the_step_and_saves_the_one_before(start):
    run = start(**LONG).start()
    step = step_in_training(run)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text + run.logs()
    assert_left_after(run, step)
    assert_resumes_exactly(run, step)


def test_weights_that_a_rule_finds_wrong_are_never_the_newest_checkpoint(start):
    """A reward that counts as collapsed in each step: when the rule fires, at the third in a row, the run is paused, that step is not saved,
    and the checkpoints of the two before it, in which the numbers were wrong already, are set aside."""
    rule = {"rewardCollapse": {"below": 2.0, "steps": 3, "action": "Pause"}}
    run = start(algorithm={"steps": 3}, checkpoint={"everySteps": 1}, failurePolicy=rule, validation=QUIET)
    assert run.run() == 130, run.text + run.logs()
    assert saved_steps(run) == [] and not (run.output / "model").exists()
    assert [path.name for path in sorted((run.output / "checkpoints").glob("lost-step-*"))] == [
        "lost-step-00000001",
        "lost-step-00000002",
    ]
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3]
    assert "the last good checkpoint is none" in run.text
