"""Colocated runs: one field is the only difference to a disaggregated one, and whoever dies with the device in hand loses it."""

import signal

from tests.e2e.harness import assert_trained_once

ONE_EACH = {
    "rollout": {"replicas": 1, "maxSequenceLength": 32, "sampling": {"maxNewTokens": 12}, "batching": "perGroup"},
    "validation": {"everySteps": 3, "maxPrompts": 4},
}
SAME = ("train/loss", "train/grad_norm", "reward/mean", "val/accuracy", "rollout/total_turns")


def numbers(run):
    return [{name: line.get(name) for name in ("step", *SAME)} for line in run.lines("metrics.jsonl")]


def trained(run):
    return [(line["step"], line["group_id"], line["prompt_index"]) for line in run.lines("ledger.jsonl")]


def test_a_colocated_run_gives_bit_for_bit_what_a_disaggregated_one_gives(start):
    apart = start(folder="apart", algorithm={"steps": 4}, **ONE_EACH)
    assert apart.run() == 0, apart.text + apart.logs()
    together = start(folder="together", algorithm={"steps": 4}, placement={"mode": "colocated"}, **ONE_EACH)
    assert together.run() == 0, together.text + together.logs()
    assert trained(together) == trained(apart) and numbers(together) == numbers(apart)
    two = ONE_EACH | {"rollout": ONE_EACH["rollout"] | {"replicas": 2}}
    hybrid = start(folder="hybrid", algorithm={"steps": 4}, placement={"mode": "hybrid"}, **two)
    assert hybrid.run() == 0, hybrid.text + hybrid.logs()
    assert trained(hybrid) == trained(apart) and numbers(hybrid) == numbers(apart), "whoever generated it"
    weights = "model/model.safetensors"
    saved = [(run.output / weights).read_bytes() for run in (apart, together, hybrid)]
    assert saved[0] == saved[1] == saved[2]
    checks = [run.lines("metrics.jsonl")[-1]["weights/content_check_passed_total"] for run in (apart, together)]
    assert checks[0] == checks[1] > 0, "the trainer scores what the rollout drew, each in its turn"
    assert apart.status()["devices"] is None and together.status()["devices"]["token"] > 8


def test_who_dies_or_is_stopped_with_the_device_in_hand_costs_no_group(start):
    """The rollout dies while it has the device, then the actor; Ctrl-C falls into a generation and into a training; each run goes on."""
    run = start(algorithm={"steps": 4000}, placement={"mode": "colocated"}, **ONE_EACH)
    run.start()
    run.at_step(2)
    run.until_devices_are_for("generating")
    pid = run.kill(role="rollout")
    run.until(lambda: [p for p in run.processes(role="rollout") if p["pid"] != pid], "a replacement")
    run.at_step(5)
    assert run.status()["epoch"] == 0, "the actor goes on"
    run.until_devices_are_for("training")
    run.kill(role="actor")
    run.until(lambda: run.status().get("epoch") == 1 and run.status().get("step", 0) >= 7, "steps of the next epoch")
    for use in ("generating", "training"):
        run.until_devices_are_for(use)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text + run.logs()
        stopped = run.status()["step"]
        assert_trained_once(run, steps=stopped, groups=4)
        if use == "generating":
            run.start("--resume", "auto")
            run.at_step(stopped + 2)
    last = stopped + 2
    assert run.run("--resume", "auto", "--set", f"algorithm.steps={last}") == 0, run.text + run.logs()
    assert_trained_once(run, steps=last, groups=4)
