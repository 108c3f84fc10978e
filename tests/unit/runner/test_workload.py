"""What a rollout's and the trainer's waiting is: by the dispatcher's own calls, on an injected clock."""

import pytest

from rl_core.api.settings import ValidationSpec
from rl_core.messages.groups import ValidationScores
from rl_core.runner.validation_round import ValidationRound
from rl_core.runner.workload import SHORTEST_WINDOW, STEPS_IN_WINDOW
from tests.unit.runner.account import ADMIT, BUDGETS, DEFER, Account


class Step:
    """A step that is measured; `at` moves the clock."""

    def __init__(self, **options):
        self.account = Account(**options)
        self.dispatcher, self.steps = self.account.dispatcher, self.account.steps
        self.workload, self.clock = self.account.workload, self.account.clock
        self.workload.begin_step()

    def at(self, now):
        self.clock.now = float(now)

    def rollouts(self):
        return {one["name"]: (one["busy"], one["starved"]) for one in self.workload.snapshot()["rollouts"]}


def test_on_policy_rollouts_starve_while_the_trainer_trains_and_it_while_they_generate():
    s = Step()
    idle = s.account.poll()  # from 0 on, nothing is open
    s.at(1)
    with s.workload.trainer_waiting():
        s.steps.open(1, 0)
        s.at(5)
        assert s.account.finish(*idle.leases) == [ADMIT] * 4
    s.account.poll()
    s.at(8)
    found = s.workload.of_step().metrics()
    assert found["rollout/starved_seconds"] == 1.0 + 3.0 and found["actor/starved_seconds"] == 4.0


def test_the_time_of_training_is_told_apart_from_idle_time_within_generation():
    s = Step()
    working = s.account.poll()
    s.account.poll(who="rollout:1")  # it gets nothing
    s.dispatcher.tick()
    s.at(1)
    with s.workload.trainer_waiting():
        s.steps.open(1, 0)
        s.at(5)
        s.account.finish(*working.leases)
    s.account.poll()
    s.at(8)
    shown = s.workload.snapshot()
    assert (shown["starved"], shown["starvedInTraining"], shown["actorStarved"]) == (0.75, 0.5, 0.5)


def test_starved_seconds_are_those_of_a_rollout_on_average():
    s = Step()
    s.steps.open(1, 0)
    s.account.lease(4)  # it takes the whole step
    s.account.poll(who="rollout:1")
    s.at(10)
    assert s.workload.of_step().metrics()["rollout/starved_seconds"] == 5.0


def test_a_rollout_that_waits_for_weights_does_not_starve():
    s = Step()
    s.account.poll()
    s.at(2)
    with s.workload.weights_in_transit():
        s.at(9)
    s.at(10)
    assert s.workload.of_step().metrics()["rollout/starved_seconds"] == 3.0


def test_a_rollout_with_room_that_works_is_busy():
    s = Step(promptsPerStep=1)
    s.steps.open(1, 0)
    s.account.lease(1)
    assert s.account.poll().waits
    s.at(4)
    s.dispatcher.tick()
    s.at(8)
    assert s.workload.of_step().metrics()["rollout/starved_seconds"] == 0.0 and s.rollouts() == {
        "rollout:0": (1.0, 0.0)
    }


def test_what_no_rollout_takes_waits_in_their_queue():
    s = Step(promptsPerStep=4)
    s.steps.open(1, 0)
    leases = s.account.lease(1)
    s.at(6)
    s.account.finish(*leases)
    s.account.lease(3)
    s.at(8)
    found = s.workload.of_step().metrics()
    assert found["rollout/queue_depth"] == pytest.approx(3 * 6 / 8) and found["actor/queue_depth"] == 0.0


def test_deferred_groups_wait_in_the_trainers_queue_until_they_are_admitted():
    s = Step(promptsPerStep=1, maxStaleness=1)
    s.steps.open(1, 0)
    first, second = s.account.lease(2)
    s.at(2)
    assert s.account.finish(first, second, version=0) == [ADMIT, DEFER], "the second is for the next step"
    assert [one["groups"] for one in s.workload.snapshot()["rollouts"]] == [2]
    s.at(6)
    s.steps.close()
    s.steps.acknowledge(1)
    s.steps.open(2, 1)
    s.at(8)
    assert s.workload.of_step().metrics()["actor/queue_depth"] == pytest.approx(1 * 4 / 8)


@pytest.mark.parametrize("how", ["given back", "not renewed", "refused", "disowned"])
def test_a_rollout_is_busy_no_longer_than_it_holds_the_lease(how):
    s = Step(promptsPerStep=1, lease_seconds=20.0)
    s.steps.open(1, 0)
    (lease,) = s.account.lease(1)
    for second in range(20):
        s.at(second)
        s.dispatcher.tick()
    s.at(20)
    if how == "given back":
        s.account.return_group(lease, "infrastructure")
    elif how == "not renewed":
        s.dispatcher.tick()
    elif how == "refused":
        s.account.finish(lease, version=7)
    else:
        s.dispatcher.return_group("rollout:0", (0, 0), lease.token, "stale", "the trainer's own doing")
        s.dispatcher.renew("rollout:0", (0, 0), [lease.token])
    s.at(40)
    assert s.rollouts() == {"rollout:0": (0.5, 0.0)}


def test_a_validation_group_keeps_a_rollout_busy_until_its_scores_come():
    s = Step()
    attempts = dict.fromkeys(BUDGETS, 2)
    s.dispatcher.open_validation(
        ValidationRound(1, 0, [{"idx": 0}], ValidationSpec(), attempts=attempts, lease_seconds=60.0, clock=s.clock)
    )
    (lease,) = s.account.lease(1)
    s.dispatcher.tick()
    s.at(5)
    s.dispatcher.take_scores(
        ValidationScores(group_id=lease.group_id, token=lease.token, rewards=(1.0,), lengths=(1,), truncated=(False,))
    )
    s.account.poll()
    s.at(10)
    assert s.rollouts() == {"rollout:0": (0.5, 0.5)}


def test_the_window_forgets_what_is_older_than_it():
    s = Step(lease_seconds=1e6)
    s.account.poll(seconds=1e9)
    for second in range(1, 400):
        if second == 100:
            s.steps.open(1, 0)  # busy from here on
        s.at(second)
        s.dispatcher.tick()
    shown = s.workload.snapshot()
    assert shown["full"] and shown["seconds"] < 2 * SHORTEST_WINDOW
    assert (shown["busy"], shown["starved"]) == (1.0, 0.0)


def test_a_long_step_makes_the_window_long_so_that_it_holds_both_parts_of_several_steps():
    s = Step()
    s.account.poll(seconds=1e9)
    s.at(SHORTEST_WINDOW)
    s.dispatcher.tick()
    assert s.workload.snapshot()["full"] is False, "it began with the tick"
    s.workload.of_step().metrics()
    s.at(2 * SHORTEST_WINDOW)
    assert s.workload.snapshot()["full"] is False
    s.at((1 + STEPS_IN_WINDOW) * SHORTEST_WINDOW)
    assert s.workload.snapshot()["full"] is True


@pytest.mark.parametrize("how", ["joins", "is lost", "drains"])
def test_the_window_begins_anew_when_a_rollout_comes_or_goes(how):
    s = Step()
    s.account.poll(seconds=1e9)
    s.account.poll(seconds=1e9, who="rollout:1")
    for second in range(100):
        s.at(second)
        s.dispatcher.tick()
    assert s.workload.snapshot()["full"] is True
    if how == "joins":
        s.account.poll(who="rollout:2")
    elif how == "is lost":
        s.dispatcher.owner_lost("rollout:1", (0, 0))
    else:
        s.account.gone.add(("rollout:1", (0, 0)))
        s.dispatcher.tick()
    shown = s.workload.snapshot()
    assert shown["full"] is False and len(shown["rollouts"]) == (3 if how == "joins" else 1)
