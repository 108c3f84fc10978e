"""Bounded asynchronous: who may run ahead, whose turn it is to train, and that nothing finished is made twice."""

from random import Random

import pytest

from rl_core.runner.admission import Bounded, OnPolicy, Standing
from rl_core.runner.asynchronous import admissible, select_groups
from tests.unit.runner.account import Account
from tests.unit.runner.schedules import Schedule


def bounded(staleness=2, prompts=2, **options):
    return Account(maxStaleness=staleness, promptsPerStep=prompts, **options)


def train(h, step, version, leases):
    """Admit `leases`, end the step, and open the next one for weights of `version` + 1."""
    assert h.admit(*leases, version=version) == [True] * len(leases)
    h.dispatcher.close()
    h.dispatcher.acknowledge(step)
    h.dispatcher.open(step + 1, version + 1)


def test_groups_of_the_next_steps_are_given_out_as_far_as_the_bound_allows():
    h = bounded(staleness=2, prompts=2)
    h.dispatcher.open(1, 0)
    first = h.lease()
    assert len(first) == 6 and h.poll().waits
    train(h, 1, 0, first[:2])
    assert [lease.policy_version for lease in h.lease(version=1)] == [1, 1], "a trained group frees its place"


def test_while_weights_travel_nobody_is_given_groups_that_would_be_a_version_older():
    h = bounded()
    h.dispatcher.open(1, 0)
    assert h.admit(*h.lease()[:2]) == [True] * 2
    h.dispatcher.close()
    h.dispatcher.acknowledge(1)
    assert h.poll().waits


def test_a_rollout_that_serves_older_weights_gets_what_can_still_train_in_time():
    h = bounded(staleness=2, prompts=2)
    h.dispatcher.open(4, 3)
    assert h.poll(version=0).waits
    assert len(h.lease(version=1)) == 2, "due in the open step, which has two places"
    assert len(h.lease(version=2, who="rollout:1")) == 2
    assert len(h.lease(version=3, who="rollout:2")) == 2


def test_a_young_group_waits_where_it_would_take_the_place_of_one_that_still_runs():
    h = bounded(staleness=1, prompts=2)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    train(h, 1, 0, leases[:2])
    young = h.lease(version=1)
    assert h.admit(*young, version=1) == [None, None], "both places are for the groups of version 0"
    assert h.admit(leases[2], version=0) == [True]
    assert h.admit(*young, version=1) == [None, None]
    assert h.admit(leases[3], version=0) == [True]
    assert h.dispatcher.close().stale == 0


def test_groups_wait_for_older_ones_that_are_due_together_in_a_later_step():
    """Two groups of version 0 run, and one step alone is left for them after this one."""
    assert select_groups(
        {"young": 1}, {"a": 0, "b": 0}, version=1, prompts_per_step=1, max_staleness=2
    ) == []  # fmt: skip
    policy = Bounded(2, 1)
    h = bounded(staleness=2, prompts=1)
    h.dispatcher.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:1])
    young = h.lease(version=1)
    assert len(first) == 3 and h.admit(*young, version=1) == [None]
    standing = Standing(version=1, target=1, admitted=0, out={0: 2})
    assert policy.room(standing, served=1) == 1 and policy.room(standing, served=0) == 0


def test_a_place_that_nobody_older_needs_any_more_is_given_away():
    h = bounded(staleness=1, prompts=1)
    h.dispatcher.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:1])
    young = h.lease(version=1)
    assert h.admit(*young, version=1) == [None]
    h.give_back(first[1], "infrastructure")
    assert h.admit(*young, version=1) == [True]


def test_older_groups_that_the_trainer_waited_for_too_long_are_made_again_until_a_younger_one_may_train():
    h = bounded(staleness=1, prompts=2, stragglerSeconds=10)
    h.dispatcher.open(1, 0)
    first = h.lease()
    train(h, 1, 0, first[:2])
    young = h.lease(version=1, who="rollout:1")
    assert h.admit(young[0], version=1) == [None]
    h.dispatcher.tick()
    h.clock.now = 10
    h.dispatcher.tick()
    assert h.admit(young[0], version=1) == [None] and not h.ledger.counts["requeued"]
    h.clock.now = 11
    h.dispatcher.tick()
    assert h.ledger.counts["requeued"] == 1, "one place was needed"
    assert h.admit(*young, version=1) == [True, None]
    (again,) = h.lease(version=1)
    assert again.group_id == first[2].group_id and again.attempt == 1, "the same prompt with the same seeds"
    assert h.dispatcher.close().stale == 1


def test_beyond_the_bound_a_group_is_made_again_and_counted():
    h = bounded(staleness=1, prompts=2)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    h.dispatcher.close()
    h.dispatcher.open(3, 2)
    assert h.admit(leases[0], version=0) == [False]
    assert leases[0].group_id in [lease.group_id for lease in h.lease(version=2)]
    assert h.dispatcher.close().stale == 1 and h.ledger.counts["requeued"] == 1


def test_a_group_with_one_token_beyond_the_bound_does_not_train():
    h = bounded(staleness=1, prompts=2)
    h.dispatcher.open(3, 2)
    (lease, *_) = h.lease(version=2)
    entry = h.entry(lease, version=2)
    object.__setattr__(entry, "v_min", 0)
    assert h.dispatcher.admit([entry]) == [False]


def test_what_comes_between_two_steps_waits_for_the_next():
    h = bounded(staleness=1, prompts=2)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    h.admit(*leases[:2])
    assert h.admit(leases[2]) == [None], "the step has its groups"
    h.dispatcher.close()
    assert h.admit(leases[2]) == [None], "no step is open"
    h.dispatcher.acknowledge(1)
    h.dispatcher.open(2, 1)
    assert h.admit(*leases[2:]) == [True] * 2


def test_a_record_on_its_way_counts_however_long_it_waits_and_whatever_becomes_of_its_rollout():
    h = bounded(lease_seconds=60)
    h.dispatcher.open(1, 0)
    delivered, running = h.lease(2)
    h.dispatcher.delivered(delivered.token)
    h.clock.now = 61
    h.dispatcher.tick()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    again = h.lease(who="rollout:1")
    assert running.group_id in [lease.group_id for lease in again]
    assert delivered.group_id not in [lease.group_id for lease in again]
    assert h.admit(delivered) == [True] and h.admit(delivered, running) == [False, False]


def test_only_the_record_of_the_current_lease_is_kept_for_a_later_step():
    h = bounded(staleness=1, prompts=1)
    h.dispatcher.open(1, 0)
    _, other = h.lease()
    h.dispatcher.owner_lost("rollout:0", (0, 0))
    again = h.lease(who="rollout:1")
    assert h.admit(other) == [False] and h.admit(again[0]) == [True] and h.admit(again[1]) == [None]
    assert h.ledger.counts["late"] == 1


def test_dynamic_sampling_fails_when_its_rounds_are_used_up_though_groups_run_ahead():
    h = bounded(staleness=2, prompts=2, dynamicSampling={"enabled": True}, maxGenerationBatches=2)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    h.admit(*leases[:2], informative=False)
    assert not h.failures
    h.admit(leases[2], informative=False)
    assert "maxGenerationBatches allows 2 rounds" in str(h.failures[0])


def test_a_changed_bound_holds_from_the_next_question_on():
    h = bounded(staleness=1, prompts=2)
    h.dispatcher.open(1, 0)
    assert len(h.lease()) == 4
    waiting = h.poll(who="rollout:1")
    h.dispatcher.adopt(Account(maxStaleness=3, promptsPerStep=2).dispatcher._account._algorithm)
    assert len(waiting.leases) == 4


def test_a_bound_of_zero_is_another_policy():
    with pytest.raises(ValueError, match="max_staleness must be at least 1, got 0; use OnPolicy for 0"):
        Bounded(0, 4)
    standing = Standing(version=3, target=4, admitted=1, out={3: 2})
    assert OnPolicy().room(standing, served=3) == 1 and OnPolicy().room(standing, served=2) == 0


def test_places_are_those_of_the_steps_up_to_the_bound():
    assert [admissible(out, prompts_per_step=4, max_staleness=2) for out in (0, 11, 12, 20)] == [12, 1, 0, 0]


def test_the_oldest_are_selected_and_what_is_beyond_the_bound_is_not_waited_for():
    finished = {"old": 3, "b": 4, "a": 4, "young": 5}
    chosen = select_groups(finished, {}, version=5, prompts_per_step=2, max_staleness=1)
    assert chosen == ["a", "b"]
    assert select_groups({"a": 5}, {}, version=5, prompts_per_step=2, max_staleness=1) == []
    assert select_groups({"a": 4, "b": 4}, {"c": 2}, version=5, prompts_per_step=2, max_staleness=1) == ["a", "b"]


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
            made = schedule.generated - len(schedule.channel) - sum(len(rank.later) for rank in schedule.ranks)
            assert schedule.stale == 0 and made == len(schedule.trained), f"schedule {number} made groups twice"


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
