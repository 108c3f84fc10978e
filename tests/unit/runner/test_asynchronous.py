"""Bounded asynchronous: who may run ahead, whose turn it is to train, and that nothing finished is made twice."""

import dataclasses
from random import Random

import pytest

from rl_core.runner.admission import Bounded, OnPolicy, StepCapacity
from tests.unit.runner.account import ADMIT, DEFER, REFUSE, Account
from tests.unit.runner.schedules import Schedule


def bounded(staleness=2, prompts=2, **options):
    return Account(maxStaleness=staleness, promptsPerStep=prompts, **options)


def train(h, step, version, leases):
    """Finish `leases`, end the step, and open the next one for weights of `version` + 1."""
    assert h.finish(*leases, version=version) == [ADMIT] * len(leases)
    h.steps.close()
    h.steps.acknowledge(step)
    h.steps.open(step + 1, version + 1)


def test_groups_of_the_next_steps_are_given_out_as_far_as_the_bound_allows():
    h = bounded(staleness=2, prompts=2)
    h.steps.open(1, 0)
    first = h.lease()
    assert len(first) == 6 and h.poll().waits
    train(h, 1, 0, first[:2])
    assert [lease.policy_version for lease in h.lease(version=1)] == [1, 1], "a trained group frees its place"


def test_while_weights_travel_nobody_is_given_groups_that_would_be_a_version_older():
    h = bounded()
    h.steps.open(1, 0)
    assert h.finish(*h.lease()[:2]) == [ADMIT] * 2
    h.steps.close()
    h.steps.acknowledge(1)
    assert h.poll().waits


def test_a_rollout_that_serves_older_weights_gets_what_can_still_train_in_time():
    h = bounded(staleness=2, prompts=2)
    h.steps.open(4, 3)
    assert h.poll(version=0).waits
    assert len(h.lease(version=1)) == 2, "due in the open step, which has two places"
    assert len(h.lease(version=2, who="rollout:1")) == 2
    assert len(h.lease(version=3, who="rollout:2")) == 2


def test_a_young_group_waits_where_it_would_take_the_place_of_one_that_still_runs():
    h = bounded(staleness=1, prompts=2)
    h.steps.open(1, 0)
    leases = h.lease()
    train(h, 1, 0, leases[:2])
    young = h.lease(version=1)
    assert h.finish(*young, version=1) == [DEFER, DEFER], "both places are for the groups of version 0"
    assert h.finish(leases[2], version=0) == [ADMIT]
    assert [h.state_of(lease) for lease in young] == [DEFER, DEFER]
    assert h.finish(leases[3], version=0) == [ADMIT]
    assert h.steps.close().stale == 0
    h.steps.acknowledge(2)
    h.steps.open(3, 2)
    assert [h.state_of(lease) for lease in young] == [ADMIT, ADMIT], "a step that opens decides about what waits"


def test_groups_wait_for_older_ones_that_are_due_together_in_a_later_step():
    """Two groups of version 0 are generated, and after the open step only one step is left for them."""
    policy = Bounded(2, 1)
    h = bounded(staleness=2, prompts=1)
    h.steps.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:1])
    young = h.lease(version=1)
    assert len(first) == 3 and h.finish(*young, version=1) == [DEFER]
    capacity = StepCapacity(version=1, target=1, admitted=0, out_by_version={0: 2})
    assert policy.num_leasable(capacity, served=1) == 1 and policy.num_leasable(capacity, served=0) == 0


@pytest.mark.parametrize("how", ["given back", "its rollout is lost", "its lease runs out"])
def test_a_place_that_nobody_older_needs_any_more_is_given_away_at_once(how):
    h = bounded(staleness=1, prompts=1)
    h.steps.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:1])
    young = h.lease(version=1, who="rollout:1")
    assert h.finish(*young, version=1) == [DEFER]
    if how == "given back":
        h.return_group(first[1], "infrastructure")
    elif how == "its rollout is lost":
        h.dispatcher.owner_lost("rollout:0", (0, 0))
    else:
        for _ in range(61):
            h.clock.now += 1.0
            h.dispatcher.tick()
    assert h.state_of(young[0]) is ADMIT


def test_a_finished_group_counts_for_the_version_of_its_oldest_token_not_for_that_of_its_lease():
    """Under weights.onUpdate continue, tokens may all be younger than the lease: such a group is due later."""
    h = bounded(staleness=1, prompts=1)
    h.steps.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:1])
    young = h.lease(version=1, who="rollout:1")
    assert h.finish(first[1], version=1) == [ADMIT], "no group is due in this step"
    assert h.finish(*young, version=1) == [DEFER] and h.steps.close().complete


def test_older_groups_that_the_trainer_waited_for_too_long_are_generated_again_until_a_younger_one_may_train():
    h = bounded(staleness=1, prompts=2, stragglerSeconds=10)
    h.steps.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:2])
    young = h.lease(version=1, who="rollout:1")
    assert h.finish(*young, version=1) == [DEFER, DEFER]
    h.dispatcher.tick()
    h.clock.now = 10
    h.dispatcher.tick()
    assert h.state_of(young[0]) is DEFER and not h.ledger.counts["requeued"]
    h.clock.now = 11
    h.dispatcher.tick()
    assert h.ledger.counts["requeued"] == 1, "one place was needed"
    assert [h.state_of(lease) for lease in young] == [ADMIT, DEFER]
    (again,) = h.lease(version=1)
    assert again.group_id == first[2].group_id and again.attempt == 1, "the same prompt with the same seeds"
    assert h.steps.close().stale == 1


def test_beyond_the_bound_a_group_is_made_again_and_counted():
    h = bounded(staleness=1, prompts=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.steps.close()
    h.steps.open(3, 2)
    assert h.finish(leases[0], version=0) == [REFUSE]
    assert leases[0].group_id in [lease.group_id for lease in h.lease(version=2)]
    assert h.steps.close().stale == 1 and h.ledger.counts["requeued"] == 1


def test_a_group_with_one_token_beyond_the_bound_does_not_train():
    h = bounded(staleness=1, prompts=2)
    h.steps.open(3, 2)
    (lease, *_) = h.lease(version=2)
    entry = dataclasses.replace(h.entry(lease, version=2), v_min=0)
    h.dispatcher.finish("rollout:0", (0, 0), entry)
    assert h.state_of(lease) is REFUSE


def test_what_comes_between_two_steps_waits_for_the_next():
    h = bounded(staleness=1, prompts=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.finish(*leases[:2])
    assert h.finish(leases[2]) == [DEFER], "the step has its groups"
    h.steps.close()
    assert h.finish(leases[3]) == [DEFER], "no step is open"
    h.steps.acknowledge(1)
    h.steps.open(2, 1)
    assert [h.state_of(lease) for lease in leases[2:]] == [ADMIT] * 2


def test_a_finished_group_counts_however_long_it_waits_and_whatever_becomes_of_its_rollout():
    h = bounded(staleness=1, prompts=1, lease_seconds=60)
    h.steps.open(1, 0)
    running, finished = h.lease(2)
    h.steps.close()
    h.steps.open(1, 0)
    assert h.finish(finished) == [ADMIT]
    h.steps.close()
    h.steps.acknowledge(1)
    h.steps.open(2, 1)
    h.clock.now = 61
    h.dispatcher.tick()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    again = h.lease(who="rollout:1", version=1)
    assert running.group_id in [lease.group_id for lease in again]
    assert finished.group_id not in [lease.group_id for lease in again]
    assert h.finish(running, version=0) == [REFUSE], "its lease ended"


def test_a_rollout_that_dies_between_storing_a_record_and_reporting_it_leaves_no_record():
    h = bounded(staleness=1, prompts=1)
    h.steps.open(1, 0)
    stored, _ = h.lease()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    assert h.state_of(stored) is REFUSE, "the record under its token is deleted"
    again = h.lease(who="rollout:1")
    assert again[0].group_id == stored.group_id and h.finish(again[0]) == [ADMIT]


def test_a_report_that_is_repeated_changes_nothing():
    h = bounded(staleness=1, prompts=1)
    h.steps.open(1, 0)
    first, second = h.lease()
    assert h.finish(first, second, first, second) == [ADMIT, DEFER, ADMIT, DEFER]
    assert len(h.moves) == 1 and len(h.steps.close().admitted) == 1


def test_a_group_is_finished_by_the_process_that_holds_its_lease_only():
    h = bounded(staleness=1, prompts=1)
    h.steps.open(1, 0)
    lease, _ = h.lease()
    h.dispatcher.finish("rollout:1", (0, 0), h.entry(lease))
    h.dispatcher.finish("rollout:0", (0, 1), h.entry(lease))
    assert h.steps.close().admitted == {}


def test_dynamic_sampling_fails_when_its_rounds_are_used_up_though_groups_run_ahead():
    h = bounded(staleness=2, prompts=2, dynamicSampling={"enabled": True}, maxGenerationBatches=2)
    h.steps.open(1, 0)
    leases = h.lease()
    h.finish(*leases[:2], informative=False)
    assert not h.failures
    h.finish(leases[2], informative=False)
    assert "maxGenerationBatches allows 2 rounds" in str(h.failures[0])
    assert "without differing rewards, which were between" in str(h.failures[0])


def test_a_changed_bound_holds_from_the_next_question_on():
    h = bounded(staleness=1, prompts=2)
    h.steps.open(1, 0)
    assert len(h.lease()) == 4
    waiting = h.poll(who="rollout:1")
    h.steps.adopt(Account(maxStaleness=3, promptsPerStep=2).training._algorithm)
    assert len(waiting.leases) == 4


def test_a_bound_of_zero_is_another_policy():
    with pytest.raises(ValueError, match="max_staleness must be at least 1, got 0; use OnPolicy for 0"):
        Bounded(0, 4)
    capacity = StepCapacity(version=3, target=4, admitted=1, out_by_version={3: 2})
    assert OnPolicy().num_leasable(capacity, served=3) == 1 and OnPolicy().num_leasable(capacity, served=2) == 0


def random_schedule(number):
    rng = Random(number)
    spread = rng.choice((0.0, 0.5, 1.5))
    prompts, ranks = rng.choice(((1, 1), (2, 1), (2, 2), (3, 1), (4, 2)))
    return Schedule(
        rng,
        staleness=rng.choice((1, 1, 2, 3)),
        prompts=prompts,
        ranks=ranks,
        steps=rng.randint(2, 5),
        rollouts=rng.randint(1, 3),
        slots=rng.randint(1, 4),
        seconds=lambda: rng.lognormvariate(0, spread),
        train_seconds=lambda: rng.choice((0.1, 1.0, 5.0)),
        publish_seconds=rng.choice((0.0, 0.5)),
        drain=rng.random() < 0.5,
        faults=rng.choice((0.0, 0.05, 0.3)),
    )


@pytest.mark.parametrize("part", range(4))
def test_no_token_is_older_than_the_bound_in_10000_random_schedules_with_deaths(part):
    for number in range(part * 2500, (part + 1) * 2500):
        schedule = random_schedule(number).run()
        assert schedule.finished, f"schedule {number} stands still in step {schedule.step}"
        assert max(schedule.trained.values()) <= schedule.staleness, f"schedule {number}"
        if not schedule.faults:
            made = schedule.generated - len(schedule.channel)
            assert schedule.stale == 0 and made == len(schedule.trained), f"schedule {number} made groups twice"
        current = {group.token for group in schedule.ledger.groups_out()}
        assert schedule.channel.keys() <= current, f"schedule {number} leaves records that nobody trains"


def test_long_samples_train_as_often_as_short_ones():
    """The first prompts of each step are slow: under the bound they are trained in the order of the data, not left for later."""
    rng = Random(3)
    schedule = Schedule(
        rng, staleness=2, prompts=4, steps=50, rollouts=2, slots=4, drain=False,
        seconds=lambda: 6.0 if rng.random() < 0.25 else 0.3, train_seconds=lambda: 1.0,
    ).run()  # fmt: skip
    assert schedule.finished and schedule.stale == 0
    last = max(int(group_id.partition("-")[2]) for group_id in schedule.trained)
    assert last < 4 * 50 + 4 * 2, "no group is passed over for more than the bound"
