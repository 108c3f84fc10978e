"""Generation ahead of training in a real run: what dies, stops or comes back leaves the account exact and the bound unbroken."""

import signal

from tests.e2e.harness import assert_trained_once

BOUND = 2


def ages(run):
    return [line["train/staleness_max"] for line in run.lines("metrics.jsonl") if line["step"]]


def test_an_asynchronous_run_survives_deaths_and_an_interruption_with_every_group_trained_once_within_the_bound(start):
    """Versions interrupt generation; a rollout dies, then the gang, then Ctrl-C; validation is in the middle of generation; the resumed run ends it."""
    run = start(
        algorithm={"steps": 12, "maxStaleness": BOUND},
        rollout={"replicas": 2},
        weights={"onUpdate": "abort_resume"},
        checkpoint={"everySteps": 2},
        validation={"everySteps": 5, "beforeTraining": False},
    )
    run.start()
    run.at_step(2)
    pid = run.kill(role="rollout", index=1)
    run.until(lambda: [p for p in run.processes(role="rollout", index=1) if p["pid"] != pid], "a replacement")
    run.at_step(4)
    run.kill(role="actor")
    run.until(lambda: run.status().get("epoch") == 1 and run.status().get("step", 0) >= 6, "steps of the next epoch")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text + run.logs()
    stopped = run.status()["step"]
    assert_trained_once(run, steps=stopped, groups=4, staleness=BOUND)
    assert run.run("--resume", "auto") == 0, run.text + run.logs()
    assert_trained_once(run, steps=12, groups=4, staleness=BOUND)
    assert 1 <= max(ages(run)) <= BOUND, "generation ran ahead"
    assert {line["rollout/cancelled_groups"] for line in run.lines("metrics.jsonl") if line["step"]} == {0}
    scored = [line["step"] for line in run.lines("metrics.jsonl") if "val/accuracy" in line]
    left = {stopped} & {10, 12}  # a validation that the interruption fell into is not made up for
    assert set(scored) | left == {5, 10, 12}, "validation goes on beside generation"
