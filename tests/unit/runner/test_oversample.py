"""More groups out than a step trains (rollout.oversample): who trains is decided by the order of issue, never by speed."""

from random import Random

import pytest

from tests.unit.runner.account import ADMIT, DEFER, REFUSE, Account


def test_more_groups_are_out_than_the_step_trains_and_none_once_it_has_its_own():
    h = Account(oversample=1.5)
    h.steps.open(1, 0)
    leases = h.lease()
    assert [lease.sample["idx"] for lease in leases] == [0, 1, 2, 3, 4, 5] and [
        lease.order for lease in leases
    ] == list(range(6))
    assert h.finish(*leases[:4]) == [ADMIT] * 4
    assert h.poll().waits


def test_a_quick_group_never_takes_the_place_of_a_slow_one_that_was_issued_before_it():
    h = Account(oversample=1.5)
    h.steps.open(1, 0)
    *first, slow, fifth, sixth = h.lease()
    assert h.finish(sixth, fifth, *first) == [DEFER, DEFER, ADMIT, ADMIT, ADMIT]
    assert [h.state_of(sixth), h.state_of(fifth)] == [DEFER, DEFER], (
        "however long they wait, the fourth is still generated"
    )
    assert h.finish(slow) == [ADMIT]
    assert sorted(h.steps.close().admitted) == ["0-0", "0-1", "0-2", "0-3"]


def test_the_next_in_order_stands_in_for_a_group_that_is_dropped_or_filtered():
    h = Account(
        oversample=1.5, attempts=1, maxDroppedGroups=1, dynamicSampling={"enabled": True}, recomputeLogProbs=True
    )
    h.steps.open(1, 0)
    a, b, c, d, e, f = h.lease()
    assert h.finish(a, b, f, e) == [ADMIT, ADMIT, DEFER, DEFER]
    h.return_group(c, "data")
    assert [h.state_of(f), h.state_of(e)] == [DEFER, ADMIT], "the first place is the fifth group's"
    assert h.finish(d, informative=False) == [REFUSE]
    assert h.state_of(f) is ADMIT
    assert h.failures == []


def test_a_group_whose_rollout_is_lost_keeps_its_place_and_is_generated_again_first():
    h = Account(oversample=1.5)
    h.steps.open(1, 0)
    lost = h.lease(1, who="rollout:1")[0]
    others = h.lease()
    h.dispatcher.owner_lost("rollout:1", (0, 0))
    assert h.finish(*others[3:]) == [DEFER, DEFER]
    (again,) = h.lease()
    assert again.group_id == lost.group_id
    assert h.finish(*others[:3], again) == [ADMIT] * 4


def test_what_is_left_over_is_cancelled_at_its_rollout_and_comes_first_in_the_next_step_as_if_it_had_not_been_out():
    h = Account(oversample=2.0)
    h.steps.open(1, 0)
    leases = h.lease(5) + h.lease(who="rollout:1")
    assert h.steps.cancel_rest() == {}, "the step has not got its groups"
    assert h.finish(leases[4], *leases[:4]) == [DEFER, ADMIT, ADMIT, ADMIT, ADMIT]
    assert h.steps.cancel_rest() == {"rollout:1": [lease.token for lease in leases[5:]]}
    assert {h.state_of(lease) for lease in leases[4:]} == {REFUSE}, (
        "their records are deleted, whether they came or not"
    )
    taken = h.steps.close()
    assert (taken.cancelled, taken.surplus) == (4, 1)
    h.steps.acknowledge(1)
    h.steps.open(2, 1)
    assert h.finish(leases[4], leases[7], version=0) == [REFUSE, REFUSE], "their records are of leases that are no more"
    again = h.lease(version=1)
    assert [lease.sample["idx"] for lease in again] == list(range(4, 12))
    assert {lease.attempt for lease in again} == {1} and h.steps.metrics()["ledger/requeued_total"] == 0


def test_cancelled_groups_are_given_out_again_after_a_resume():
    h, resumed = Account(oversample=1.5), Account(oversample=1.5)
    h.steps.open(1, 0)
    leases = h.lease()
    h.finish(*leases[:4])
    h.steps.cancel_rest()
    h.steps.close()
    h.steps.acknowledge(1)
    resumed.steps.load_state_dict(h.steps.state_dict())
    resumed.steps.open(2, 1)
    assert [lease.sample["idx"] for lease in resumed.lease(version=1)] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(200))
def test_whatever_ends_first_a_step_trains_the_first_groups_of_the_order_that_teach_something(seed):
    rng = Random(seed)
    h = Account(
        oversample=rng.choice([1.25, 1.5, 3.0]), dynamicSampling={"enabled": True}, maxGenerationBatches=50, recomputeLogProbs=True
    )  # fmt: skip
    teaches = [rng.random() < 0.7 for _ in range(50)]
    start = 0
    for step in range(1, 4):
        h.steps.open(step, step - 1)
        running, leased, poll = [], [], h.poll(9, version=step - 1)
        for _ in range(10_000):  # a bound, so that a fault ends the test
            if not poll.waits:
                running += poll.leases
                leased += poll.leases
                poll = h.poll(rng.randint(1, 9), version=step - 1)
            trained = [lease.sample["idx"] for lease in leased if h.state_of(lease) is ADMIT]
            if len(trained) == 4:
                break
            lease = running.pop(rng.randrange(len(running)))  # any order of arrival
            h.finish(lease, version=step - 1, informative=teaches[lease.sample["idx"]])
        wanted = [index for index in range(start, 50) if teaches[index]][:4]
        assert sorted(trained) == wanted
        h.steps.cancel_rest()
        h.steps.close()
        h.steps.acknowledge(step)
        start = wanted[-1] + 1


def test_groups_that_run_ahead_for_later_steps_go_on_when_a_step_has_its_own():
    h = Account(maxStaleness=1, recomputeLogProbs=True)
    h.steps.open(1, 0)
    first = h.lease()
    assert len(first) == 8
    assert h.finish(*first[:4]) == [ADMIT] * 4
    assert h.steps.cancel_rest() == {}
    h.steps.close()
    h.steps.acknowledge(1)
    h.steps.open(2, 1)
    assert h.finish(*first[4:]) == [ADMIT] * 4
