"""Intake: what is admitted, what is replaced, when the run ends (I1, I5)."""

import pytest

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError, InfrastructureError, SamplingExhausted
from rl_core.messages.groups import GroupEntry
from rl_core.runner.intake import Intake, reward_metrics
from rl_core.runner.ledger import PromptLedger


class Harness:
    """An intake over a real ledger; the channel is a list."""

    def __init__(self, *, size=50, data_ranks=1, attempts=2, **algorithm):
        self.put: list[dict] = []
        self.ended: list[int] = []
        self.failures: list[Exception] = []
        spec = AlgorithmSpec.model_validate({"promptsPerStep": 4, "groupSize": 2, **algorithm})
        ledger = PromptLedger(list(range(size)), seed=0, shuffle=False, lease_seconds=60, max_attempts=attempts)
        self.intake = Intake(
            ledger, spec, put_prompts=self.put.extend, end_step=self.ended.append, data_ranks=data_ranks
        )
        self.intake.on_failure = self.failures.append

    def entry(self, item, *, version=0, informative=True, rewards=(0.0, 1.0)):
        return GroupEntry(
            group_id=item["group_id"],
            token=item["lease_token"],
            v_min=version,
            v_max=version,
            tokens=8,
            rewards=tuple(rewards),
            informative=informative,
            rank=0,
        )

    def admit(self, *items, **kw):
        return self.intake.admit([self.entry(item, **kw) for item in items])


def test_a_step_gives_out_its_prompts_with_the_version_and_admits_each_once():
    h = Harness()
    h.intake.open(1, 7)
    assert [item["policy_version"] for item in h.put] == [7] * 4
    assert h.admit(*h.put, version=7) == [True] * 4
    assert h.admit(h.put[0], version=7) == [False]
    taken = h.intake.close()
    assert len(taken.admitted) == 4
    assert [index for _, index, _ in h.intake.acknowledge(1)] == [0, 1, 2, 3]


def test_a_record_of_another_version_is_given_out_again_not_trained():
    h = Harness()
    h.intake.open(1, 3)
    assert h.admit(h.put[1], version=2) == [False]
    assert h.put[4]["group_id"] == h.put[1]["group_id"]
    assert h.admit(h.put[4], version=3) == [True]


@pytest.mark.parametrize("reason", ["worker_lost", "infrastructure", "data"])
def test_giving_back_a_group_whose_record_was_admitted_changes_nothing(reason):
    h = Harness()
    h.intake.open(1, 0)
    assert h.admit(*h.put) == [True] * 4
    h.intake.give_back(h.put[0]["group_id"], h.put[0]["lease_token"], reason, "a second delivery failed")
    assert len(h.put) == 4 and not h.failures
    h.intake.close()
    assert len(h.intake.acknowledge(1)) == 4


def test_uninformative_groups_are_replaced_by_new_prompts():
    h = Harness(dynamicSampling={"enabled": True})
    h.intake.open(1, 0)
    assert h.admit(h.put[0], informative=False) == [False]
    assert len(h.put) == 5 and h.put[4]["group_id"] == "0-4"
    assert h.admit(*h.put[1:]) == [True] * 4
    assert h.admit(h.put[0]) == [False]
    assert h.intake.close().sampling_metrics(4) == {
        "dynamic_sampling/batches": 5 / 4,
        "dynamic_sampling/kept_groups": 4.0,
        "dynamic_sampling/dropped_groups": 1.0,
        "dynamic_sampling/surplus_groups": 1.0,
        "filtered_reward": 0.5,
    }


def test_dynamic_sampling_ends_the_run_when_its_rounds_are_used_up():
    h = Harness(dynamicSampling={"enabled": True}, maxGenerationBatches=2)
    h.intake.open(1, 0)
    for number in range(8):
        h.admit(h.put[number], informative=False)
    assert isinstance(h.failures[0], SamplingExhausted)
    assert "0 of 4 informative groups in step 1" in str(h.failures[0])
    assert len(h.put) == 8


def test_the_first_drop_ends_the_run_with_the_cause_by_default():
    h = Harness(attempts=1)
    h.intake.open(1, 0)
    h.intake.give_back(h.put[0]["group_id"], h.put[0]["lease_token"], "data", "reward f returned NaN")
    assert isinstance(h.failures[0], DataError)
    assert "reward f returned NaN" in str(h.failures[0]) and "maxDroppedGroups" in str(h.failures[0])


def test_an_infrastructure_drop_is_not_a_data_error():
    h = Harness(attempts=1)
    h.intake.open(1, 0)
    h.intake.give_back(h.put[0]["group_id"], h.put[0]["lease_token"], "infrastructure", "engine gone")
    assert isinstance(h.failures[0], InfrastructureError)


def test_a_dropped_group_within_budget_is_replaced_by_the_next_prompt():
    h = Harness(attempts=1, maxDroppedGroups=1)
    h.intake.open(1, 0)
    h.intake.give_back(h.put[0]["group_id"], h.put[0]["lease_token"], "data", "bad row")
    assert not h.failures and h.put[4]["group_id"] == "0-4"


def test_a_group_given_back_within_its_attempts_is_given_out_again_with_another_seed():
    h = Harness(attempts=2)
    h.intake.open(1, 0)
    h.intake.give_back(h.put[2]["group_id"], h.put[2]["lease_token"], "deadline", "slow")
    assert h.put[4]["group_id"] == h.put[2]["group_id"] and h.put[4]["attempt"] == 2


@pytest.mark.parametrize(("ranks", "target"), [(1, 3), (2, 2)])
def test_shrink_cuts_the_step_to_a_multiple_of_the_data_ranks(ranks, target):
    h = Harness(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5, data_ranks=ranks)
    h.intake.open(1, 0)
    h.admit(*h.put[:target])
    h.intake.give_back(h.put[3]["group_id"], h.put[3]["lease_token"], "data", "bad row")
    assert h.ended == [1]
    assert len(h.intake.close().admitted) == target


def drop(harness, item):
    harness.intake.give_back(item["group_id"], item["lease_token"], "data", "bad row")


def test_a_step_cut_before_its_groups_are_there_ends_when_they_are():
    h = Harness(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5)
    h.intake.open(1, 0)
    drop(h, h.put[3])
    assert h.admit(*h.put[:2]) == [True] * 2 and h.ended == []
    assert h.admit(h.put[2]) == [True] and h.ended == [1], "the rank waits for a fourth group that nobody generates"


def test_a_drop_after_more_groups_than_a_cut_step_may_have_is_replaced():
    h = Harness(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.intake.open(1, 0)
    h.admit(*h.put[:3])
    drop(h, h.put[3])
    assert h.ended == [] and len(h.put) == 5 and h.admit(h.put[4]) == [True]
    assert len(h.intake.close().admitted) == 4


def test_the_group_a_cut_leaves_over_is_trained_in_a_later_step():
    h = Harness(attempts=2, maxDroppedGroups=9, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.intake.open(1, 0)
    for _ in range(2):  # the second attempt is the last
        drop(h, next(item for item in reversed(h.put) if item["group_id"] == "0-3"))
    assert h.admit(*h.put[:3]) == [True, True, False] and h.ended == [1]
    h.intake.close()
    h.intake.acknowledge(1)
    h.intake.open(2, 1)
    assert "0-2" in [item["group_id"] for item in h.put[-4:]]


def test_a_cut_that_left_one_over_takes_the_next_drop_from_it():
    h = Harness(attempts=1, promptsPerStep=8, maxDroppedGroups=9, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.intake.open(1, 0)
    drop(h, h.put[7])
    drop(h, h.put[6])
    assert h.admit(*h.put[:6]) == [True] * 6 and h.ended == [1] and len(h.put) == 8


def test_a_step_below_the_minimum_fraction_is_not_shrunk_but_refilled():
    h = Harness(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.9)
    h.intake.open(1, 0)
    h.intake.give_back(h.put[3]["group_id"], h.put[3]["lease_token"], "data", "bad row")
    assert h.ended == [] and len(h.put) == 5


def test_a_late_record_after_the_step_closed_is_refused():
    h = Harness()
    h.intake.open(1, 0)
    h.intake.close()
    assert h.admit(h.put[0]) == [False]


def test_an_unknown_token_of_an_earlier_run_is_ignored():
    h = Harness()
    h.intake.open(1, 0)
    h.intake.give_back("0-0", "other.1.0-0", "data", "x")
    assert not h.failures


def test_reward_metrics_leave_out_what_is_not_finite():
    h, item = Harness(), {"group_id": "0-0", "lease_token": "x.1.0-0"}
    metrics = reward_metrics([h.entry(item, rewards=(1.0, float("nan"))), h.entry(item, rewards=(0.0, 0.5))])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/max"] == 1.0
    assert reward_metrics([h.entry(item, rewards=(float("nan"),))]) == {}
