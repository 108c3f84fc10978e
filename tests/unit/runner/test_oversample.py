"""More groups out than a step trains (rollout.oversample): who trains is decided by the order of issue, never by speed."""

from random import Random

import pytest

from tests.unit.runner.account import Account


def test_more_groups_are_out_than_the_step_trains_and_none_once_it_has_its_own():
    h = Account(oversample=1.5)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    assert [lease.sample["idx"] for lease in leases] == [0, 1, 2, 3, 4, 5] and [
        lease.order for lease in leases
    ] == list(range(6))
    assert h.admit(*leases[:4]) == [True] * 4
    assert h.poll().waits


def test_a_quick_group_never_takes_the_place_of_a_slow_one_that_was_issued_before_it():
    h = Account(oversample=1.5)
    h.dispatcher.open(1, 0)
    *first, slow, fifth, sixth = h.lease()
    assert h.admit(sixth, fifth, *first) == [None, None, True, True, True]
    assert h.admit(sixth, fifth) == [None, None], "whatever they wait, the fourth is still made"
    assert h.admit(slow) == [True]
    assert sorted(h.dispatcher.close().admitted) == ["0-0", "0-1", "0-2", "0-3"]


def test_the_next_in_order_stands_in_for_a_group_that_is_dropped_or_filtered():
    h = Account(
        oversample=1.5, attempts=1, maxDroppedGroups=1, dynamicSampling={"enabled": True}, recomputeLogProbs=True
    )
    h.dispatcher.open(1, 0)
    a, b, c, d, e, f = h.lease()
    assert h.admit(a, b, f, e) == [True, True, None, None]
    h.give_back(c, "data")
    assert h.admit(f, e) == [None, True], "the first place is the fifth group's"
    assert h.admit(d, informative=False) == [False]
    assert h.admit(f) == [True]
    assert h.failures == []


def test_a_group_whose_rollout_is_lost_keeps_its_place_and_is_made_again_first():
    h = Account(oversample=1.5)
    h.dispatcher.open(1, 0)
    lost = h.lease(1, who="rollout:1")[0]
    others = h.lease()
    h.dispatcher.owner_lost("rollout:1", (0, 0))
    assert h.admit(*others[3:]) == [None, None]
    (again,) = h.lease()
    assert again.group_id == lost.group_id
    assert h.admit(*others[:3], again) == [True] * 4


def test_what_is_left_over_is_cancelled_at_its_rollout_and_comes_first_in_the_next_step_as_if_it_had_not_been_out():
    h = Account(oversample=2.0)
    h.dispatcher.open(1, 0)
    leases = h.lease(5) + h.lease(who="rollout:1")
    assert h.dispatcher.cancel_rest() == {}, "the step has not got its groups"
    h.dispatcher.delivered(leases[4].token)
    assert h.admit(leases[4], *leases[:4]) == [None, True, True, True, True]
    assert h.dispatcher.cancel_rest() == {"rollout:1": [lease.token for lease in leases[5:]]}
    assert h.dispatcher.close().cancelled == 4
    h.dispatcher.acknowledge(1)
    h.dispatcher.open(2, 1)
    assert h.admit(leases[4], leases[7], version=0) == [False, False], "their records are of leases that are no more"
    again = h.lease(version=1)
    assert [lease.sample["idx"] for lease in again] == list(range(4, 12))
    assert {lease.attempt for lease in again} == {1} and h.dispatcher.metrics()["ledger/requeued_total"] == 0


def test_cancelled_groups_are_given_out_again_after_a_resume():
    h, resumed = Account(oversample=1.5), Account(oversample=1.5)
    h.dispatcher.open(1, 0)
    leases = h.lease()
    h.admit(*leases[:4])
    h.dispatcher.cancel_rest()
    h.dispatcher.close()
    h.dispatcher.acknowledge(1)
    resumed.dispatcher.load_state_dict(h.dispatcher.state_dict())
    resumed.dispatcher.open(2, 1)
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
        h.dispatcher.open(step, step - 1)
        running, waiting, trained, poll = [], [], [], h.poll(9, version=step - 1)
        for _ in range(10_000):  # a bound, so that a fault ends the test
            if len(trained) == 4:
                break
            if not poll.waits:
                running += poll.leases
                poll = h.poll(rng.randint(1, 9), version=step - 1)
            done = [*waiting, running.pop(rng.randrange(len(running)))] if running else waiting
            waiting = []
            for lease in done:  # any order of arrival
                index = lease.sample["idx"]
                (verdict,) = h.admit(lease, version=step - 1, informative=teaches[index])
                trained += [index] if verdict else []
                waiting += [lease] if verdict is None else []
        wanted = [index for index in range(start, 50) if teaches[index]][:4]
        assert sorted(trained) == wanted
        h.dispatcher.cancel_rest()
        h.dispatcher.close()
        h.dispatcher.acknowledge(step)
        start = wanted[-1] + 1


def test_groups_that_run_ahead_for_later_steps_go_on_when_a_step_has_its_own():
    h = Account(maxStaleness=1, recomputeLogProbs=True)
    h.dispatcher.open(1, 0)
    first = h.lease()
    assert len(first) == 8
    assert h.admit(*first[:4]) == [True] * 4
    assert h.dispatcher.cancel_rest() == {}
    h.dispatcher.close()
    h.dispatcher.acknowledge(1)
    h.dispatcher.open(2, 1)
    assert h.admit(*first[4:]) == [True] * 4
