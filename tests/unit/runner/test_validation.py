"""Validation numbers: errors are excluded and counted, never scored as zero."""

import dataclasses

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.channel import Channel
from rl_core.messages.groups import ValidationScores
from rl_core.observability.metric_list import METRICS
from rl_core.runner.validation import Validation, summarise
from tests.unit.runner.account import Account
from tests.unit.samples.kept import kept


def answer(group, rewards):
    return ValidationScores(
        group_id=group, token="", rewards=tuple(rewards), lengths=(4,) * len(rewards), truncated=(False,) * len(rewards)
    )


def test_accuracy_is_the_share_of_samples_with_reward_one():
    answers = [answer("a", [1.0]), answer("b", [0.0]), answer("c", [0.5]), answer("d", [1.0])]
    metrics = summarise(answers, errors=0, group_size=1)
    assert metrics["val/accuracy"] == 0.5 and metrics["val/reward_mean"] == 0.625 and metrics["val/errors"] == 0


def test_a_failed_prompt_is_counted_and_changes_no_mean():
    metrics = summarise([answer("a", [1.0])], errors=1, group_size=1)
    assert metrics["val/accuracy"] == 1.0 and metrics["val/errors"] == 1 and metrics["val/prompts"] == 2


def test_pass_at_k_needs_one_solved_sample_of_a_prompt():
    metrics = summarise([answer("a", [0.0, 1.0]), answer("b", [0.0, 0.0])], errors=0, group_size=2)
    assert metrics["val/pass@2"] == 0.5 and metrics["val/accuracy"] == 0.25


def test_a_prompt_whose_samples_have_no_reward_is_not_an_unsolved_one():
    answers = [answer("a", [0.0, 1.0]), answer("b", [None, None]), answer("c", [None, 0.0])]
    metrics = summarise(answers, errors=0, group_size=2)
    assert metrics["val/pass@2"] == 0.5 and metrics["val/accuracy"] == pytest.approx(1 / 3)
    assert metrics["val/errors"] == 0 and metrics["val/prompts"] == 3


def test_only_errors_give_no_accuracy_at_all():
    assert "val/accuracy" not in summarise([], errors=1, group_size=1)


class Run:
    """A validation over a real dispatcher; `rollout` answers each prompt it is given as often as the validation looks."""

    def __init__(self, samples, validation=None, **runtime):
        spec = RLJobSpec.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t"}, "validation": validation or {}, "runtime": runtime}
        )
        self.account, self.results = Account(), Channel.create("validation", local=True)
        budgets = dict.fromkeys(("worker_lost", "infrastructure", "deadline", "data", "stale", "epoch"), 1)
        self.validation = Validation(
            spec, samples, dispatcher=self.account.dispatcher, results=self.results, attempts=budgets
        )

    def answers(self, version, reward):
        def look():
            poll = self.account.poll(version=version)
            for lease in [] if poll.waits else poll.leases:
                self.results.put(
                    dataclasses.replace(
                        answer(lease.group_id, [reward(lease.group_id) if callable(reward) else reward]),
                        token=lease.token,
                    )
                )
            return False

        return look


def test_an_empty_split_is_refused():
    with pytest.raises(ConfigError, match="at least one prompt"):
        Run([])


def test_every_prompt_is_measured_by_rollouts_of_that_version():
    run = Run([{"idx": number} for number in range(3)])
    metrics = run.validation.measure(4, cancelled=run.answers(4, 1.0))
    assert metrics["val/accuracy"] == 1.0 and metrics["val/prompts"] == 3


def test_each_data_set_has_metrics_of_its_own_and_a_limit_of_its_own():
    samples = [{"idx": n, "data_set": "sums" if n < 4 else "words"} for n in range(6)]
    run = Run(samples, validation={"maxPrompts": 3})
    metrics = run.validation.measure(
        1, cancelled=run.answers(1, lambda group: float(int(group.rpartition("-")[2]) < 3))
    )
    assert metrics["val/prompts"] == 5 and metrics["val/accuracy"] == 0.6
    assert metrics["val/sums/prompts"] == 3 and metrics["val/sums/accuracy"] == 1.0
    assert metrics["val/words/prompts"] == 2 and metrics["val/words/accuracy"] == metrics["val/words/pass@1"] == 0.0
    assert not [name for name in metrics if not any(metric.describes(name) for metric in METRICS)]


def test_the_sample_that_failed_a_prompt_is_kept_after_those_that_were_scored():
    run = Run([{"idx": 0}, {"idx": 1}, {"idx": 2}])

    def look():
        poll = run.account.poll(version=1)
        for lease in [] if poll.waits else poll.leases:
            number = lease.sample["idx"]
            sample = kept(lease.group_id, prompt_index=number)
            if number < 2:
                failed = dataclasses.replace(sample, error=f"prompt {number}")
                run.account.return_group(lease, "data", "reward raised", failed)
            else:
                run.results.put(
                    dataclasses.replace(answer(lease.group_id, [1.0]), token=lease.token, samples=(sample,))
                )
        return False

    metrics = run.validation.measure(1, cancelled=look)
    assert metrics["val/errors"] == 2
    assert [(s.prompt_index, s.error) for s in run.validation.kept] == [(2, ""), (0, "prompt 0"), (1, "prompt 1")]


def test_answers_of_an_earlier_cancelled_round_are_not_counted():
    run = Run([{"idx": 0}])
    looks = []

    def leave_after_the_first_answer():
        run.answers(0, 1.0)()
        looks.append(1)
        return True

    run.validation.measure(0, cancelled=leave_after_the_first_answer)
    assert run.results.qsize() == 1
    assert run.validation.measure(1, cancelled=run.answers(1, 0.0))["val/accuracy"] == 0.0


def test_missing_answers_are_reported_at_the_deadline():
    run = Run([{"idx": 0}, {"idx": 1}], deadlines={"rollout": 0.001})
    with pytest.raises(DeadlineExceeded, match="got 0 of 2 answers"):
        run.validation.measure(0)
