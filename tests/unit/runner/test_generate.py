"""What the runner tells of a step's groups, which lie on several data ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

from rl_core.api.job import RLJobSpec
from rl_core.runner.reasoning import ReasoningRunner

SPEC = {
    "model": {"path": "/models/tiny"},
    "data": {"train": "/data/train.jsonl"},
    "algorithm": {"steps": 10},
    "actor": {"optimizer": {"learningRate": 1.0e-3}},
    "env": {"type": "math"},
}


def test_rollout_metrics_are_those_of_all_ranks():
    told = [
        {"rollout/total_turns": 8.0, "rollout/total_reward/mean": 0.25, "rollout/total_reward/max": 1.0},
        {"rollout/total_turns": 4.0, "rollout/total_reward/mean": 0.75, "rollout/total_reward/max": 3.0},
        {},  # a step that was cut had no group for it
    ]
    runner = SimpleNamespace(
        spec=RLJobSpec.model_validate(SPEC),
        step=0,
        version=0,
        board=SimpleNamespace(during=lambda phase: nullcontext()),
        timers=SimpleNamespace(measure=lambda name: nullcontext()),
        attendance=SimpleNamespace(patient=False, await_groups=lambda receiving, await_result, limit: told),
        actor=SimpleNamespace(within=lambda seconds: SimpleNamespace(recv_batch=lambda *args: None)),
        intake=SimpleNamespace(open=lambda step, version: None),
        sync=SimpleNamespace(begin_check=lambda: None, confirm=lambda: None),
        trajectories=None,
        await_result=None,
    )
    assert ReasoningRunner.generate(runner) == {
        "rollout/total_turns": 12.0,
        "rollout/total_reward/mean": 0.5,
        "rollout/total_reward/max": 3.0,
    }


def test_the_status_tells_finite_numbers_only_as_json_has_no_others():
    told = {}
    runner = SimpleNamespace(
        step=3,
        version=4,
        epoch=1,
        timers=SimpleNamespace(seconds={"time/step": 2.0}),
        trackers=SimpleNamespace(log=lambda step, values: told.update(logged=values)),
        board=SimpleNamespace(set=lambda **facts: told.update(facts)),
    )
    ReasoningRunner._log(runner, {"train/loss": float("nan"), "train/kl": float("inf"), "train/lr": 0.5, "note": "x"})
    assert told["metrics"] == {"policy_version": 4, "epoch": 1, "train/lr": 0.5, "time/step": 2.0}
    assert told["logged"]["note"] == "x"
