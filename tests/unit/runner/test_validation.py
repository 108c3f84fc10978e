"""Validation numbers: errors are excluded and counted, never scored as zero (I5)."""

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.channel import Channel
from rl_core.runner.validation import Validation, summarise


def answer(group, rewards, *, error=None):
    return {
        "group_id": group,
        "rewards": rewards,
        "lengths": [4] * len(rewards),
        "truncated": [False] * len(rewards),
        "error": error,
    }


def test_accuracy_is_the_share_of_samples_with_reward_one():
    metrics = summarise([answer("a", [1.0]), answer("b", [0.0]), answer("c", [0.5]), answer("d", [1.0])], group_size=1)
    assert metrics["val/accuracy"] == 0.5 and metrics["val/reward_mean"] == 0.625 and metrics["val/errors"] == 0


def test_a_failed_prompt_is_counted_and_changes_no_mean():
    metrics = summarise([answer("a", [1.0]), answer("b", [], error="reward raised")], group_size=1)
    assert metrics["val/accuracy"] == 1.0 and metrics["val/errors"] == 1 and metrics["val/prompts"] == 2


def test_pass_at_k_needs_one_solved_sample_of_a_prompt():
    metrics = summarise([answer("a", [0.0, 1.0]), answer("b", [0.0, 0.0])], group_size=2)
    assert metrics["val/pass@2"] == 0.5 and metrics["val/accuracy"] == 0.25


def test_a_prompt_whose_samples_have_no_reward_is_not_an_unsolved_one():
    answers = [answer("a", [0.0, 1.0]), answer("b", [None, None]), answer("c", [None, 0.0])]
    metrics = summarise(answers, group_size=2)
    assert metrics["val/pass@2"] == 0.5 and metrics["val/accuracy"] == pytest.approx(1 / 3)
    assert metrics["val/errors"] == 0 and metrics["val/prompts"] == 3


def test_only_errors_give_no_accuracy_at_all():
    assert "val/accuracy" not in summarise([answer("a", [], error="x")], group_size=1)


def make(samples, **runtime):
    spec = RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "runtime": runtime})
    prompts, results = Channel.create("p", local=True), Channel.create("r", local=True)
    return Validation(spec, samples, prompts=prompts, results=results), prompts, results


def test_an_empty_split_is_refused():
    with pytest.raises(ConfigError, match="at least one prompt"):
        make([])


def test_answers_of_an_earlier_cancelled_round_are_not_counted():
    validation, prompts, results = make([{"idx": 0}])
    validation.measure(0, cancelled=lambda: True)
    stale = prompts.get()["group_id"]
    results.put(answer(stale, [1.0]))
    item = None

    def cancelled():
        nonlocal item
        if item is None:
            item = prompts.get()
            results.put(answer(item["group_id"], [0.0]))
        return False

    assert validation.measure(1, cancelled=cancelled)["val/accuracy"] == 0.0
    assert item["policy_version"] == 1 and item["greedy"] is True


def test_missing_answers_are_told_at_the_deadline():
    validation, _, _ = make([{"idx": 0}, {"idx": 1}], deadlines={"rollout": 0.001})
    with pytest.raises(DeadlineExceeded, match="got 0 of 2 answers"):
        validation.measure(0)
