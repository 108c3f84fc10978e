"""The one account of a group: who gets it, what is admitted, what is replaced, when the run ends."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import ConfigError, DataError, InfrastructureError, SamplingExhausted
from rl_core.messages.groups import GroupEntry, rank_key
from rl_core.runner.step_state import explain_filtered, reward_metrics
from tests.unit.runner.account import ADMIT, DEFER, REFUSE, Account
from tests.unit.samples.kept import kept


def test_a_step_gives_out_its_prompts_with_the_version_and_admits_each_once():
    h = Account()
    h.steps.open(1, 7)
    leases = h.lease(version=7)
    assert [(lease.policy_version, lease.num_generations, lease.temperature) for lease in leases] == [(7, 2, None)] * 4
    assert h.finish(*leases, version=7) == [ADMIT] * 4
    h.finish(leases[0], version=7)
    assert len(h.moves) == 4
    assert len(h.steps.close().admitted) == 4
    assert [group.prompt_index for group in h.steps.acknowledge(1)] == [0, 1, 2, 3]


def test_whoever_waits_is_answered_when_the_step_opens_and_gets_what_it_has_room_for():
    h = Account()
    first, second = h.poll(3), h.poll(3, who="rollout:1")
    assert first.waits and second.waits
    h.steps.open(1, 0)
    assert [len(first.leases), len(second.leases)] == [3, 1]


def test_a_rollout_that_serves_another_version_waits_and_its_acknowledgement_answers_it():
    h = Account()
    poll = h.poll(version=0)
    h.steps.open(1, 1)
    assert poll.waits
    h.steps.close()
    h.dispatcher.record_served([("rollout:0", (0, 0))], 1)
    h.steps.open(2, 1)
    assert len(poll.leases) == 4


def test_an_acknowledgement_says_nothing_of_the_next_process_under_that_name():
    h = Account()
    h.dispatcher.record_served([("rollout:0", (0, 0))], 1)
    h.steps.open(1, 1)
    assert h.poll(version=-1, incarnation=(0, 1)).waits


def test_a_poll_is_answered_with_nothing_when_its_time_is_up_and_forgotten_when_its_caller_leaves():
    h = Account()
    poll, left = h.poll(seconds=20.0), h.poll(who="rollout:1")
    left.on_cancel()
    h.clock.now = 19.9
    h.dispatcher.tick()
    assert poll.waits
    h.clock.now = 20.0
    h.dispatcher.tick()
    assert poll.leases == []
    h.steps.open(1, 0)
    assert left.waits and list(h.ledger._table) == []


def test_a_rollout_that_asks_again_has_its_earlier_question_answered_with_nothing():
    h = Account()
    earlier, newer, other = h.poll(version=0), h.poll(version=1), h.poll(version=1, who="rollout:1")
    assert earlier.leases == [] and newer.waits and other.waits


def test_a_member_that_is_gone_or_leaves_gets_nothing():
    h = Account()
    h.gone.add(("rollout:0", (0, 0)))
    poll = h.poll()
    h.steps.open(1, 0)
    assert poll.waits and list(h.ledger._table) == []


def test_a_lost_member_s_groups_are_given_out_again_at_once_with_the_same_sample_and_seed():
    h = Account()
    h.steps.open(1, 0)
    held, idle = h.lease(), h.poll(who="rollout:1")
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    again = idle.leases
    assert [(lease.group_id, lease.sample, lease.attempt) for lease in again] == [
        (lease.group_id, lease.sample, lease.attempt) for lease in held
    ]
    assert not {lease.token for lease in again} & {lease.token for lease in held}
    assert h.finish(*held) == [REFUSE] * 4 and h.finish(*again) == [ADMIT] * 4


def test_the_loss_of_an_earlier_process_takes_nothing_from_its_successor():
    h = Account()
    h.steps.open(1, 0)
    leases = h.lease(incarnation=(0, 1))
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    assert h.finish(*leases) == [ADMIT] * 4


def test_a_lease_that_is_renewed_runs_on_and_one_that_is_not_goes_to_another():
    h = Account(lease_seconds=60.0)
    h.steps.open(1, 0)
    first, second = h.lease(2), h.lease(2, who="rollout:1")
    for second_of_run in range(1, 91):
        h.clock.now = float(second_of_run)
        if second_of_run % 20 == 0:
            stale = h.dispatcher.renew("rollout:0", (0, 0), [lease.token for lease in first])
            assert stale == []
        h.dispatcher.tick()
    assert h.dispatcher.renew("rollout:1", (0, 0), [lease.token for lease in second]) == [
        lease.token for lease in second
    ]
    assert {lease.group_id for lease in h.lease()} == {lease.group_id for lease in second}


def test_nobody_renews_the_lease_of_another():
    h = Account()
    h.steps.open(1, 0)
    (lease, *_) = h.lease()
    assert h.dispatcher.renew("rollout:1", (0, 0), [lease.token, "x.1.0-1"]) == [lease.token, "x.1.0-1"]


def test_a_runner_that_stood_still_takes_no_lease_for_overdue():
    h = Account(lease_seconds=60.0)
    h.steps.open(1, 0)
    leases = h.lease()
    h.dispatcher.tick()
    h.clock.now = 100.0
    h.dispatcher.tick()
    assert h.finish(*leases) == [ADMIT] * 4


def test_leases_larger_than_one_message_are_taken_back_and_given_out_in_smaller_answers():
    h = Account()
    h.steps.open(1, 0)
    too_large = h.poll(travels=lambda leases: len(leases) < 3)
    assert len(too_large.leases) == 4 and h.ledger.metrics()["ledger/leased"] == 0
    assert [len(h.lease()), len(h.lease())] == [2, 2] and not h.failures


def test_a_single_prompt_larger_than_a_message_ends_the_run():
    h = Account(promptsPerStep=1)
    h.steps.open(1, 0)
    h.poll(travels=lambda leases: False)
    assert isinstance(h.failures[0], DataError) and "group 0-0" in str(h.failures[0])


def test_who_holds_what_since_when_is_shown():
    h = Account()
    h.steps.open(1, 0)
    (lease,) = h.lease(1)
    h.clock.now = 3.0
    (held,) = h.steps.held()
    assert (held.group_id, held.state.value, held.owner, held.seconds, held.attempt) == (
        lease.group_id, "leased", "rollout:0 (0.0)", 3.0, 1,
    )  # fmt: skip


# --- what is admitted ----------------------------------------------------------------------------------------------------


def test_a_record_of_another_version_is_given_out_again_not_trained():
    h = Account()
    h.steps.open(1, 3)
    leases = h.lease(version=3)
    assert h.finish(leases[1], version=2) == [REFUSE]
    (again,) = h.lease(version=3)
    assert again.group_id == leases[1].group_id
    assert h.finish(again, version=3) == [ADMIT]


@pytest.mark.parametrize("reason", ["worker_lost", "infrastructure", "data"])
def test_giving_back_a_group_whose_record_was_admitted_changes_nothing(reason):
    h = Account()
    h.steps.open(1, 0)
    leases = h.lease()
    assert h.finish(*leases) == [ADMIT] * 4
    h.return_group(leases[0], reason, "a second delivery failed")
    assert h.poll().waits and not h.failures
    h.steps.close()
    assert len(h.steps.acknowledge(1)) == 4


def test_uninformative_groups_are_replaced_by_new_prompts():
    h = Account(dynamicSampling={"enabled": True})
    h.steps.open(1, 0)
    leases = h.lease()
    assert h.finish(leases[0], informative=False) == [REFUSE]
    (fresh,) = h.lease()
    assert fresh.group_id == "0-4"
    assert h.finish(*leases[1:], fresh) == [ADMIT] * 4
    assert h.finish(leases[0]) == [REFUSE]
    assert h.steps.close().sampling_metrics(4) == {
        "dynamic_sampling/batches": 5 / 4,
        "dynamic_sampling/kept_groups": 4.0,
        "dynamic_sampling/dropped_groups": 1.0,
        "dynamic_sampling/surplus_groups": 1.0,
        "filtered_reward": 0.5,
    }


def test_records_of_the_first_filtered_groups_of_a_step_stay_for_the_samples_and_the_others_are_deleted():
    h = Account(dynamicSampling={"enabled": True, "minStd": 0.6}, maxGenerationBatches=3, kept_filtered=2)
    h.steps.open(1, 0)
    leases = h.lease()
    rewards = ((1.0, 1.0), (0.0, 0.5), (float("nan"), 1.0))
    found = [h.finish(lease, informative=False, rewards=own)[0] for lease, own in zip(leases, rewards, strict=False)]
    assert found == [DEFER, DEFER, REFUSE], "the third record is deleted, the others are where the rollout stored them"
    assert h.steps.take_filtered(0) == []
    kept = h.steps.take_filtered(1)
    assert [(one.token, one.step, one.version) for one in kept] == [(lease.token, 1, 0) for lease in leases[:2]]
    assert "that differ, got 2 times 1" in kept[0].why and "above 0.6, got 0.3536" in kept[1].why
    assert "at least two rewards in a group, got 1" in explain_filtered(rewards[2], 0.6)
    assert h.steps.take_filtered(1) == []


def test_dynamic_sampling_ends_the_run_when_its_rounds_are_used_up():
    h = Account(dynamicSampling={"enabled": True}, maxGenerationBatches=2)
    h.steps.open(1, 0)
    for _ in range(2):
        assert not h.failures
        h.finish(*h.lease(), informative=False)
    assert isinstance(h.failures[0], SamplingExhausted)
    assert "0 of 4 informative groups in step 1" in str(h.failures[0])
    assert h.poll().waits


def test_a_group_finished_after_its_step_closed_is_refused_by_the_next_and_comes_again():
    h = Account()
    h.steps.open(1, 0)
    leases = h.lease()
    h.steps.close()
    assert h.finish(leases[0]) == [DEFER]
    h.steps.open(2, 1)
    assert h.state_of(leases[0]) is REFUSE and h.ledger.metrics()["ledger/pending"] == 1


def test_an_unknown_token_of_an_earlier_run_is_ignored():
    h = Account()
    h.steps.open(1, 0)
    h.dispatcher.return_group("rollout:0", (0, 0), "other.1.0-0", "data", "x")
    assert not h.failures


@pytest.mark.parametrize("seed", range(20))
def test_arrival_decides_neither_which_groups_train_nor_on_which_data_rank(seed):
    h = Account(promptsPerStep=8, data_ranks=4)
    h.steps.open(1, 0)
    leases = h.lease(5) + h.lease(3, who="rollout:1")
    h.finish(*Random(seed).sample(leases, 8))
    ranks = h.ranks(1)
    tokens = [lease.token for lease in leases]
    assert {rank: sorted(map(tokens.index, found)) for rank, found in ranks.items()} == {
        rank: [rank, rank + 4] for rank in range(4)
    }


@pytest.mark.parametrize("seed", range(20))
def test_data_ranks_hold_equally_many_groups_whatever_is_filtered(seed):
    rng = Random(seed)
    h = Account(promptsPerStep=8, data_ranks=4, dynamicSampling={"enabled": True}, maxGenerationBatches=99)
    h.steps.open(1, 0)
    while not h.training._step.complete:
        for lease in rng.sample(leases := h.lease(), len(leases)):
            h.finish(lease, informative=rng.random() < 0.5)
    assert [len(tokens) for _, tokens in sorted(h.ranks(1).items())] == [2] * 4


# --- what is dropped -----------------------------------------------------------------------------------------------------


def test_the_first_drop_ends_the_run_with_the_cause_by_default():
    h = Account(attempts=1)
    h.steps.open(1, 0)
    h.return_group(h.lease()[0], "data", "reward f returned NaN")
    assert isinstance(h.failures[0], DataError)
    assert "reward f returned NaN" in str(h.failures[0]) and "maxDroppedGroups" in str(h.failures[0])


def test_a_wrong_job_that_shows_in_a_group_ends_the_run_as_such_whatever_the_budget():
    h = Account(attempts=1, maxDroppedGroups=100)
    h.steps.open(1, 0)
    h.return_group(h.lease()[0], "config", "rewards by name need reward_weights")
    assert isinstance(h.failures[0], ConfigError) and str(h.failures[0]) == "rewards by name need reward_weights"


def test_the_message_names_the_row_and_the_failed_sample_of_a_dropped_group_is_kept():
    h = Account(attempts=2, maxDroppedGroups=30)
    h.steps.open(1, 0)
    first = h.lease()[0]
    h.return_group(first, "data", "reward f raised ValueError", kept("0-0", 1, error="attempt 1"))
    assert h.steps.take_failed() == [] and not h.failures, "it is tried again"
    last = h.lease()[0]
    h.return_group(last, "data", "reward f raised ValueError", kept("0-0", 1, error="attempt 2"))
    assert (first.group_id, last.group_id) == ("0-0", "0-0")
    assert [sample.error for sample in h.steps.take_failed()] == ["attempt 2"] and h.steps.take_failed() == []
    h = Account(attempts=1)
    h.steps.open(1, 0)
    h.return_group(h.lease()[0], "data", "reward f returned NaN")
    assert "group 0-0 (train.jsonl row 1), data: reward f returned NaN" in str(h.failures[0])


def test_an_infrastructure_drop_is_not_a_data_error():
    h = Account(attempts=1)
    h.steps.open(1, 0)
    h.return_group(h.lease()[0], "infrastructure", "engine gone")
    assert isinstance(h.failures[0], InfrastructureError)


def test_what_a_cluster_s_shortage_caused_is_not_the_group_s_fault(caplog):
    h = Account(attempts={"infrastructure": 1, "deadline": 1, "worker_lost": 1, "data": 1, "stale": 1, "epoch": 1000})
    h.steps.open(1, 0)
    h.short = True
    for _ in range(50):
        h.return_group(h.lease(1)[0], "infrastructure", "no environment")
    assert not h.failures
    assert "given back (infrastructure): no environment" in caplog.text, "the log has the true reason"


@pytest.mark.parametrize("how", ["lost", "expired"])
def test_a_group_dropped_by_losses_or_by_expired_leases_spends_the_drop_budget(how):
    """Two expiries with two attempts dropped four groups and ended nothing."""
    h = Account(attempts=2, lease_seconds=60.0)
    h.steps.open(1, 0)
    for _ in range(2):
        assert not h.failures
        h.lease()
        if how == "lost":
            h.dispatcher.owner_lost("rollout:0", (0, 0))
        else:
            for _second in range(61):
                h.clock.now += 1.0
                h.dispatcher.tick()
    assert isinstance(h.failures[0], InfrastructureError) and "allows 0 dropped groups, got" in str(h.failures[0])


def test_losses_of_a_group_count_in_a_row_only():
    h = Account(attempts={"worker_lost": 2, "data": 9, "infrastructure": 9, "deadline": 9, "stale": 9, "epoch": 9})
    h.steps.open(1, 0)
    for _ in range(4):
        h.lease(1)
        h.dispatcher.owner_lost("rollout:0", (0, 0))
        h.return_group(h.lease(1)[0], "deadline", "slow")
    assert not h.failures


def test_a_dropped_group_within_budget_is_replaced_by_the_next_prompt():
    h = Account(attempts=1, maxDroppedGroups=1)
    h.steps.open(1, 0)
    h.return_group(h.lease()[0], "data", "bad row")
    assert not h.failures and [lease.group_id for lease in h.lease()] == ["0-4"]


def test_a_group_given_back_within_its_attempts_is_given_out_again_with_another_seed():
    h = Account(attempts=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.return_group(leases[2], "deadline", "slow")
    (again,) = h.lease()
    assert again.group_id == leases[2].group_id and again.attempt == 2


def keys(step, h):
    """Return the keys of all data ranks: closed, they end the wait of a rank for its share of the whole step."""
    return [rank_key(step, rank) for rank in range(h.data_ranks)]


@pytest.mark.parametrize(("ranks", "target"), [(1, 3), (2, 2)])
def test_shrink_cuts_the_step_to_a_multiple_of_the_data_ranks(ranks, target):
    h = Account(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5, data_ranks=ranks)
    h.steps.open(1, 0)
    leases = h.lease()
    h.finish(*leases[:target])
    h.return_group(leases[3], "data", "bad row")
    assert h.closed == keys(1, h)
    assert len(h.steps.close().admitted) == target


def test_a_step_cut_before_its_groups_are_there_ends_when_they_are():
    h = Account(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5)
    h.steps.open(1, 0)
    leases = h.lease()
    h.return_group(leases[3], "data", "bad row")
    assert h.finish(*leases[:2]) == [ADMIT] * 2 and h.closed == []
    assert h.finish(leases[2]) == [ADMIT] and h.closed == keys(1, h), (
        "the rank waits for a fourth group that nobody generates"
    )


def test_a_drop_after_more_groups_than_a_cut_step_may_have_is_replaced():
    h = Account(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.finish(*leases[:3])
    h.return_group(leases[3], "data", "bad row")
    assert h.closed == [] and h.finish(*h.lease()) == [ADMIT]
    assert len(h.steps.close().admitted) == 4


def test_the_group_a_cut_leaves_over_is_trained_in_a_later_step():
    h = Account(attempts=2, maxDroppedGroups=9, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.return_group(leases[3], "data", "bad row")
    h.return_group(*h.lease(), "data", "bad row")
    assert h.finish(*leases[:3]) == [ADMIT, ADMIT, DEFER] and h.closed == keys(1, h)
    h.steps.cancel_rest()
    assert h.state_of(leases[2]) is REFUSE and h.steps.close().surplus == 1
    h.steps.acknowledge(1)
    h.steps.open(2, 1)
    assert "0-2" in [lease.group_id for lease in h.lease(version=1)]


def test_a_cut_that_left_one_over_takes_the_next_drop_from_it():
    h = Account(attempts=1, promptsPerStep=8, maxDroppedGroups=9, onDrop="shrink", minBatchFraction=0.5, data_ranks=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.return_group(leases[7], "data", "bad row")
    h.return_group(leases[6], "data", "bad row")
    assert h.finish(*leases[:6]) == [ADMIT] * 6 and h.closed == keys(1, h) and h.poll().waits


def test_a_step_below_the_minimum_fraction_is_not_shrunk_but_refilled():
    h = Account(attempts=1, maxDroppedGroups=1, onDrop="shrink", minBatchFraction=0.9)
    h.steps.open(1, 0)
    h.return_group(h.lease()[3], "data", "bad row")
    assert h.closed == [] and len(h.lease()) == 1


# --- properties ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["lease", "lost", "late", "finish", "stale"]), st.integers(0, 2)), max_size=60)
)
def test_whatever_rollouts_do_a_step_trains_each_group_once_and_none_is_forgotten(moves):
    """Two rollouts lease, die, answer late or twice; the step still ends with its groups, each trained once."""
    h = Account(attempts=1000, promptsPerStep=6)
    h.steps.open(1, 0)
    held, incarnations, dead = {0: [], 1: [], 2: []}, [0, 0, 0], []
    for move, who in moves:
        name = {"who": f"rollout:{who}", "incarnation": (0, incarnations[who])}
        if move == "lease":
            poll = h.poll(2, **name)
            held[who] += poll.leases if not poll.waits else []
            if poll.waits:
                poll.on_cancel()
        elif move == "lost":
            h.dispatcher.owner_lost(name["who"], name["incarnation"])
            dead += held[who]
            held[who], incarnations[who] = [], incarnations[who] + 1
        elif move == "late" and dead:
            assert h.finish(dead[who % len(dead)]) == [REFUSE]
        elif move == "finish" and held[who]:
            assert h.finish(held[who].pop()) == [ADMIT]
        elif move == "stale" and held[who]:
            h.return_group(held[who].pop(), "stale")
    for who in range(3):
        h.finish(*held[who])
    h.finish(*h.lease(incarnation=(9, 9))) if len(h.ledger.held()) < 6 else None
    taken = h.steps.close()
    assert sorted(taken.admitted) == [f"0-{number}" for number in range(6)]
    assert len(h.steps.acknowledge(1)) == 6 and not h.failures


def test_reward_metrics_leave_out_and_count_what_is_not_finite():
    def entry(*rewards):
        return GroupEntry(group_id="g", token="t", v_min=0, v_max=0, rewards=rewards, tokens=1, informative=True)

    metrics = reward_metrics([entry(1.0, float("nan")), entry(0.0, 0.5)])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/max"] == 1.0 and metrics["reward/missing"] == 1.0
    assert reward_metrics([entry(float("nan"))]) == {"reward/missing": 1.0}
