"""What the trainer keeps on its devices in each phase of a run in which it offloads."""

from types import SimpleNamespace

import pytest

from rl_core.api.roles import OffloadSpec
from rl_core.runner.device_schedule import OffloadingSchedule


class Actor:
    """Stands in for the actor group: two ranks that move 8 bytes each, in 1 and 2 seconds."""

    def __init__(self):
        self.asked = []

    def occupy(self, parts):
        self.asked.append(parts)
        answers = [{"offload/bytes": 8.0, "offload/seconds": 1.0}, {"offload/bytes": 8.0, "offload/seconds": 2.0}]
        return SimpleNamespace(wait=lambda seconds: answers)


@pytest.fixture
def actor():
    return Actor()


def phases(actor, **offload):
    return OffloadingSchedule(OffloadSpec(**offload).resident, actor=actor, seconds=1.0)


def test_each_phase_has_what_it_needs(actor):
    run = phases(actor, params=True, grads=True, optimizer=True)
    with run.generating():
        pass
    with run.training():
        pass
    with run.syncing():
        pass
    assert actor.asked == [[], ["gradients", "weights"], ["weights"]]


def test_what_is_not_to_leave_stays(actor):
    run = phases(actor, optimizer=True)
    for phase in (run.generating, run.training, run.syncing):
        with phase():
            pass
    assert actor.asked == [["gradients", "weights"]] * 3


def test_generation_takes_nothing_from_a_trainer_at_work(actor):
    run = phases(actor, params=True)
    with run.training(), run.generating():
        assert len(actor.asked) == 1
    with run.generating():
        assert actor.asked[-1] == ["gradients", "optimizer"]


def test_a_step_reports_the_bytes_of_all_ranks_and_the_seconds_of_the_slowest_once(actor):
    run = phases(actor, params=True)
    with run.training():
        pass
    with run.syncing():
        pass
    assert run.metrics() == {"offload/bytes": 32.0, "offload/seconds": 4.0}
    assert run.metrics() == {}
