"""A call to an env worker answers that its episodes are lost once the worker is, and passes on everything else."""

import concurrent.futures

import pytest

from rl_core.api.errors import RolloutDataFailure, WorkerLost
from rl_core.messages.calls import MethodResult
from rl_core.messages.embodied import EpisodeStats
from rl_core.runner.env_calls import EnvCall


class Call:
    def __init__(self):
        self.future = concurrent.futures.Future()

    def describe(self):
        return "env:1 (pod p)"

    def cancel(self):
        self.future.cancel()


@pytest.fixture
def call():
    return Call()


def test_an_answer_is_passed_on(call):
    followed, result = EnvCall("env:1", call, episodes=8), MethodResult(value=EpisodeStats(steps=3), durations={})
    call.future.set_result(result)
    assert followed.future.result() == result and not followed.lost
    assert followed.describe() == "env:1 (pod p)"


def test_a_lost_worker_loses_its_episodes(call):
    followed = EnvCall("env:1", call, episodes=8)
    call.future.set_exception(WorkerLost("gone"))
    assert followed.future.result().value == EpisodeStats(lost=8) and followed.lost


def test_a_worker_that_is_given_up_is_lost_and_its_late_answer_is_ignored(call):
    followed = EnvCall("env:1", call, episodes=2)
    followed.give_up()
    assert call.future.cancelled()
    assert followed.future.result().value == EpisodeStats(lost=2) and followed.lost


def test_what_is_wrong_with_the_simulators_is_raised(call):
    followed = EnvCall("env:1", call, episodes=8)
    call.future.set_exception(RolloutDataFailure("broken"))
    with pytest.raises(RolloutDataFailure, match="broken"):
        followed.future.result()
    assert not followed.lost


def test_cancelling_cancels_the_call(call):
    followed = EnvCall("env:1", call, episodes=8)
    followed.cancel()
    assert call.future.cancelled() and followed.future.cancelled() and not followed.lost
