"""A round of validation: given out with the lease calls of training, each prompt measured once or counted as an error."""

from rl_core.api.settings import ValidationSpec
from rl_core.messages.groups import ValidationScores
from rl_core.runner.validation_round import ValidationRound
from tests.unit.runner.account import Account


def scores(lease, *rewards):
    lengths, truncated = (4,) * len(rewards), (False,) * len(rewards)
    return ValidationScores(
        group_id=lease.group_id, token=lease.token, rewards=rewards, lengths=lengths, truncated=truncated
    )


def open_round(h, size=3, *, number=1, version=0, **settings):
    budgets = dict.fromkeys(("worker_lost", "infrastructure", "deadline", "data", "stale", "epoch"), 1) | {
        "worker_lost": 2
    }
    spec = ValidationSpec.model_validate(settings)
    prompts = [{"idx": number} for number in range(size)]
    validation = ValidationRound(number, version, prompts, spec, attempts=budgets, lease_seconds=60.0, clock=h.clock)
    h.dispatcher.open_validation(validation)
    return validation


def test_validation_is_given_out_by_the_same_call_each_prompt_once_with_its_settings():
    h = Account()
    poll = h.poll(2)
    validation = open_round(h, version=0, temperature=0, samplesPerPrompt=1)
    leases = [*poll.leases, *h.lease()]
    assert [(lease.mode, lease.sample["idx"], lease.temperature) for lease in leases] == [
        ("validate", number, 0) for number in range(3)
    ]
    for lease in leases:
        h.dispatcher.take_scores(scores(lease, 1.0))
    assert len(validation.scores) == 3 and h.poll().waits


def test_a_prompt_of_a_lost_rollout_is_measured_by_another_and_counts_once():
    h = Account()
    validation = open_round(h, 1)
    (old,) = h.lease()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    (new,) = h.lease(who="rollout:1")
    h.dispatcher.take_scores(scores(old, 0.0))
    h.dispatcher.take_scores(scores(new, 1.0))
    assert [one.rewards for one in validation.scores.values()] == [(1.0,)] and validation.failures == {}


def test_a_prompt_that_no_rollout_survives_or_can_score_is_an_error_and_not_a_wrong_answer():
    h = Account()
    validation = open_round(h, 2)
    first, _ = h.lease()
    h.return_group(first, "data", "reward raised")
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    h.lease()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    assert validation.failures == {"val1-0-0": "reward raised", "val1-0-1": "rollout:0 was lost"}
    assert validation.scores == {} and not h.failures


def test_scores_of_a_round_that_was_left_are_not_counted_in_the_next():
    h = Account()
    open_round(h, 1)
    (stale,) = h.lease()
    h.dispatcher.close_validation()
    validation = open_round(h, 1, number=2)
    h.dispatcher.take_scores(scores(stale, 1.0))
    assert validation.scores == {}


def test_a_rollout_of_other_weights_measures_nothing():
    h = Account()
    open_round(h, 1, version=3)
    assert h.poll(version=2).waits
