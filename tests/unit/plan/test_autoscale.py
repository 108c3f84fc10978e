"""The rule of rollout.autoscale against simulated jobs: where it comes to rest, that it stays there, and never leaves its bounds."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.roles import RolloutSpec
from rl_core.plan import autoscale
from rl_core.plan.autoscale import HYSTERESIS, IdleShares, read

SYNCHRONOUS, ASYNCHRONOUS = "on policy", "asynchronous"


def spec(replicas, *, low=1, high=1024, target=0.2, **more):
    rule = {"min": low, "max": high, "targetIdle": target}
    return RolloutSpec.model_validate({"replicas": replicas, "autoscale": rule, **more})


def decide(rollout, measured, *, on_policy=False):
    return autoscale.decide(rollout, measured, on_policy=on_policy)


def shares(rollouts, *, starved, trainer, seconds=60.0):
    return IdleShares(rollouts=rollouts, starved=starved, trainer_starved=trainer, seconds=seconds)


class Job:
    """A job whose generation takes `work` rollout seconds a step and whose training takes `training` seconds.

    A window tells what `count` rollouts did; a wished number of pods comes `start` windows later, and until then no window is whole.
    """

    def __init__(self, program, *, work, training, start, noise):
        self.program, self.work, self.training, self.start, self.noise = program, work, training, start, noise

    def window(self, count):
        generating = self.work / count
        step = generating + self.training if self.program is SYNCHRONOUS else max(generating, self.training)
        idle, waits = 1 - generating / step, 1 - self.training / step
        return [min(max(share + next(self.noise), 0.0), 1.0) for share in (idle, waits)]

    def follow(self, rollout, windows):
        """Return the number of rollouts after each window."""
        wanted, present, left, history = rollout.replicas, rollout.replicas, 0, []
        for _ in range(windows):
            if wanted != present:
                left -= 1
                present = wanted if left <= 0 else present
            idle, waits = self.window(present)
            whole = {
                "full": wanted == present, "seconds": 60.0, "starved": idle, "actorStarved": waits, "rollouts": [{}] * present,
            }  # fmt: skip
            on_policy = self.program is SYNCHRONOUS
            whole |= {"starvedInTraining": idle} if on_policy else {}
            verdict = decide(rollout.model_copy(update={"replicas": wanted}), read(whole), on_policy=on_policy)
            if verdict is not None:
                wanted, left = verdict.replicas, self.start
            history.append(wanted)
        return history


@st.composite
def jobs(draw):
    target = draw(st.sampled_from([0.02, 0.1, 0.2, 0.5, 0.9]))
    band = min(HYSTERESIS, target / 2)
    dice = random.Random(draw(st.integers(0, 2**32)))
    noise = iter(lambda: dice.uniform(-band / 4, band / 4), None)
    low = draw(st.integers(1, 8))
    high = draw(st.integers(low, 64))
    job = Job(
        draw(st.sampled_from([SYNCHRONOUS, ASYNCHRONOUS])),
        work=draw(st.floats(0.5, 2000.0)),
        training=draw(st.floats(0.5, 60.0)),
        start=draw(st.integers(1, 5)),
        noise=noise,
    )
    return job, spec(draw(st.integers(low, high)), low=low, high=high, target=target), band


@settings(deadline=None, max_examples=300)
@given(jobs())
def test_a_steady_job_comes_to_rest_within_bounds_without_ever_turning_back(drawn):
    job, rollout, band = drawn
    rule = rollout.autoscale
    history = [rollout.replicas, *job.follow(rollout, 400)]
    assert all(rule.min <= count <= rule.max for count in history)
    moves = [(old, new) for old, new in itertools.pairwise(history) if old != new]
    assert all(math.ceil(old / 2) <= new <= 2 * old for old, new in moves)
    turns = [new > old for old, new in moves]
    assert turns == sorted(turns, reverse=True), f"up, then down to the target, and never up again: {history}"
    assert len(set(history[-50:])) == 1, "at rest"
    idle, waits = job.window(history[-1])
    assert idle >= rule.target_idle - 2 * band or waits <= HYSTERESIS + band or history[-1] == rule.max
    if job.program is SYNCHRONOUS:
        assert all(turns), "the time of training, in which nothing can be generated, removes no rollout"
        return
    fewer = max(history[-1] - 1, 1)
    same_work = 1 - history[-1] / fewer * (1 - idle)
    assert idle <= rule.target_idle + 2 * band or history[-1] == rule.min or same_work <= rule.target_idle + band


def test_the_trainers_hunger_asks_for_what_would_feed_it_at_most_twice_as_many():
    assert decide(spec(4), shares(4, starved=0.0, trainer=0.9)).replicas == 8
    assert decide(spec(4), shares(4, starved=0.0, trainer=0.2)).replicas == 5
    assert decide(spec(4), shares(4, starved=0.0, trainer=0.4)).replicas == 7
    assert decide(spec(4), shares(4, starved=0.0, trainer=0.0)) is None, "nobody waits"


def test_idle_rollouts_ask_for_as_many_as_have_the_same_work_at_least_half():
    assert decide(spec(8), shares(8, starved=0.5, trainer=0.0)).replicas == 5
    assert decide(spec(8), shares(8, starved=0.95, trainer=0.9)).replicas == 4, "more would not help the trainer"
    assert decide(spec(1), shares(1, starved=0.9, trainer=0.0)) is None


def test_on_policy_the_training_time_removes_no_rollout_and_idle_time_within_generation_does():
    mostly_training = IdleShares(
        rollouts=16, starved=0.75, starved_in_training=0.75, trainer_starved=0.25, seconds=60.0
    )
    assert decide(spec(16), mostly_training, on_policy=True) is None
    assert decide(spec(16), mostly_training).replicas == 8, "asynchronous rollouts could generate meanwhile"
    half_idle = IdleShares(rollouts=16, starved=0.875, starved_in_training=0.75, trainer_starved=0.25, seconds=60.0)
    assert half_idle.starved_in_generation == 0.5 and decide(spec(16), half_idle, on_policy=True).replicas == 10
    assert "for 88% of the time, for 50% of generation" in decide(spec(16), half_idle, on_policy=True).reason


@pytest.mark.parametrize("starved", [0.151, 0.2, 0.249])
def test_near_the_target_nothing_moves(starved):
    assert decide(spec(4), shares(4, starved=starved, trainer=0.5)) is None


@pytest.mark.parametrize(
    ("bounds", "starved", "replicas"),
    [
        ({"high": 5}, 0.0, 5),
        ({"high": 6, "maxReplicas": 6}, 0.0, 6),
        ({"low": 3}, 0.9, 3),
        ({"low": 3, "minReplicas": 3}, 0.9, 3),
    ],
    ids=["max", "maxReplicas", "min", "minReplicas"],
)
def test_the_bounds_hold(bounds, starved, replicas):
    assert decide(spec(4, **bounds), shares(4, starved=starved, trainer=0.9)).replicas == replicas


def test_rollouts_that_never_join_do_not_freeze_the_number():
    """Four are wanted, and three have joined: the estimate of the three counts beyond the range in which others may be on their way."""
    assert decide(spec(4), shares(3, starved=0.9, trainer=0.0)).replicas == 2, "idle ones go"
    assert decide(spec(4), shares(3, starved=0.0, trainer=0.9)).replicas == 6, "a hungry trainer gets more"
    assert decide(spec(4), shares(3, starved=0.0, trainer=0.2)) is None, (
        "three ask for the fourth, which is wanted already"
    )
    assert decide(spec(4), shares(3, starved=0.2, trainer=0.0)) is None
    assert decide(spec(8), shares(3, starved=0.0, trainer=0.9)) is None, "at most twice as many as there are"
    assert decide(spec(4), shares(0, starved=0.0, trainer=1.0)) is None
    reason = decide(spec(4), shares(3, starved=0.9, trainer=0.0)).reason
    assert reason.startswith(
        "rollout.replicas 4 -> 2: over 60 s the 3 that have joined had nothing to generate for 90% of the time"
    )


def test_numbers_of_another_size_and_no_numbers_decide_nothing():
    assert decide(spec(4), shares(5, starved=0.0, trainer=0.9)) is None, "one of them leaves"
    assert decide(spec(4), None) is None
    assert decide(RolloutSpec(replicas=4), shares(4, starved=0.0, trainer=0.9)) is None


def test_the_reason_gives_the_numbers():
    verdict = decide(spec(2, target=0.1), shares(2, starved=0.01, trainer=0.6, seconds=62.0))
    assert verdict.reason == (
        "rollout.replicas 2 -> 4: over 62 s rollouts had nothing to generate for 1% of the time (targetIdle 10%), the trainer nothing "
        "to train for 60%"
    )


WHOLE = {"full": True, "seconds": 60.0, "starved": 0.25, "actorStarved": 0.5, "rollouts": [{}, {}]}


def test_a_whole_window_is_read():
    assert read(WHOLE) == shares(2, starved=0.25, trainer=0.5)


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        {},
        {**WHOLE, "full": False},
        {**WHOLE, "full": "true"},
        {**WHOLE, "starved": None},
        {**WHOLE, "starved": 1.5},
        {**WHOLE, "starvedInTraining": -0.5},
        {**WHOLE, "actorStarved": float("nan")},
        {**WHOLE, "seconds": True},
        {**WHOLE, "rollouts": 2},
    ],
    ids=str,
)
def test_what_is_not_whole_or_makes_no_sense_says_nothing(told):
    assert read(told) is None
