"""Every bound of a sync comes from the job's deadlines and the size, and no part reaches beyond the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.publisher import WeightPublisher
from rl_core.weights.receiver import WeightReceiver


def spec_of(**deadlines):
    return {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "algorithm": {"promptsPerStep": 1, "steps": 1},
        "runtime": {"deadlines": deadlines},
    }


def test_the_bounds_are_those_of_the_job():
    spec = RLJobSpec.model_validate(spec_of(weightSync=1200, lost=40, collective=90))
    deadlines = Deadlines.from_spec(spec)
    assert (deadlines.sync_seconds, deadlines.silence_seconds, deadlines.collective_seconds) == (1200, 40, 90)
    assert (deadlines.ready_seconds, deadlines.commit_seconds) == (120, 120)


class NoTarget:
    def names_and_shapes(self):
        return {}


async def test_publisher_and_receiver_of_a_job_have_its_bounds():
    spec = spec_of(weightSync=1200, lost=40, collective=90)
    publisher, receiver = WeightPublisher(spec, 0), WeightReceiver(spec, None, 0, NoTarget())
    try:
        assert publisher._deadlines == receiver._deadlines == Deadlines.from_spec(RLJobSpec.model_validate(spec))
    finally:
        publisher.close()
        await receiver.close()


def test_the_bytes_get_more_time_the_more_they_are_up_to_what_the_whole_leaves():
    assert Deadlines().transfer(10**9) == 60
    assert Deadlines().transfer(10 * 10**9) == 200
    assert Deadlines().transfer(28 * 10**9) == 240 and Deadlines().total(28 * 10**9) == 300
    assert Deadlines(sync_seconds=1200).transfer(28 * 10**9) == 560  # 14 billion parameters in two bytes
    assert Deadlines().total(10**9) == 120
    assert Deadlines().straggler(10**6) == 1 and Deadlines(sync_seconds=1200).straggler(28 * 10**9) == 56


@given(st.floats(0.1, 1e5), st.integers(0, 10**13))
def test_no_sync_takes_longer_than_the_whole(sync_seconds, nbytes):
    deadlines = Deadlines(sync_seconds=sync_seconds)
    assert deadlines.total(nbytes) <= sync_seconds * (1 + 1e-9)
    assert deadlines.pull_seconds < sync_seconds


def test_what_gathering_took_is_missing_from_the_rest():
    assert Deadlines(sync_seconds=300).after(100).total(10**12) == pytest.approx(200)
    with pytest.raises(
        DeadlineExceeded, match=r"got 301\.0 s of the 300 s of a sync; raise runtime.deadlines.weightSync"
    ):
        Deadlines(sync_seconds=300).after(301)
