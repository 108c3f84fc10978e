"""Who gets the devices when: one kind of work at a time, nothing moved that may stay, no wait without an end."""

import threading

import pytest

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.runner.device_lease import DeviceLease, Use

GENERATING, SYNCING, TRAINING = Use.GENERATING, Use.SYNCING, Use.TRAINING


class Moves:
    """Remembers hand-overs; `fail` is raised by the next one."""

    def __init__(self):
        self.log, self.fail = [], None

    def __call__(self, before, use, token):
        self.log.append((before, use, token))
        fail, self.fail = self.fail, None
        if fail is not None:
            raise fail


@pytest.fixture
def moves():
    return Moves()


@pytest.fixture
def lease(moves):
    return DeviceLease(moves, seconds=30.0)


def in_background(block):
    """Start a thread that enters `block` and stays until it is told to leave; return (entered, leave, thread)."""
    entered, leave = threading.Event(), threading.Event()

    def run():
        with block:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return entered, leave, thread


def test_devices_stay_as_they_are_until_another_kind_of_work_asks(lease, moves):
    for use in (GENERATING, GENERATING, TRAINING, SYNCING, SYNCING, GENERATING):
        with lease.using(use):
            assert lease.use is use
    assert moves.log == [
        (None, GENERATING, 1), (GENERATING, TRAINING, 2), (TRAINING, SYNCING, 3), (SYNCING, GENERATING, 4),
    ]  # fmt: skip


def test_nothing_moves_under_somebody_who_uses_the_devices(lease, moves):
    with lease.using(GENERATING):
        entered, leave, thread = in_background(lease.using(TRAINING))
        with lease.using(GENERATING):  # past the one that waits: what it waits for may need this
            assert not entered.is_set()
        assert len(moves.log) == 1
    assert entered.wait(30) and moves.log[1:] == [(GENERATING, TRAINING, 2)]
    leave.set()
    thread.join(30)


def test_who_joins_waits_until_another_one_has_the_devices_for_it(lease, moves):
    with lease.using(TRAINING):
        entered, leave, thread = in_background(lease.shared(GENERATING, seconds=30.0))
    assert not entered.is_set() and len(moves.log) == 1, "it moves nothing by itself"
    with lease.using(GENERATING):
        assert entered.wait(30)
    waiting, end, other = in_background(lease.using(TRAINING))
    assert not waiting.is_set(), "the one that joins is not done"
    leave.set()
    assert waiting.wait(30)
    end.set()
    thread.join(30)
    other.join(30)


def test_after_a_hand_over_that_failed_the_next_one_moves_everything(lease, moves):
    moves.fail = InfrastructureError("no room")
    with pytest.raises(InfrastructureError, match="no room"), lease.using(TRAINING):
        pytest.fail("the devices were not handed over")
    assert lease.use is None
    with lease.using(GENERATING):
        assert moves.log[-1] == (None, GENERATING, 2)


def test_who_waits_too_long_is_told_who_has_the_devices(moves):
    lease = DeviceLease(moves, seconds=0.01)
    with lease.using(GENERATING):
        with pytest.raises(DeadlineExceeded, match="free for training within 0 s, got them held by generating"):
            lease.using(TRAINING).__enter__()
        with pytest.raises(DeadlineExceeded, match="free for syncing"):
            lease.shared(SYNCING, seconds=1.0).__enter__()


def test_a_join_that_takes_its_time_delays_the_loop_and_does_not_end_it(moves):
    """The loop waits for as long as the joining member may use the devices, and only then for its own bound."""
    now = [0.0]
    lease = DeviceLease(moves, seconds=10.0, clock=lambda: now[0])
    with lease.using(GENERATING):
        joining = lease.shared(GENERATING, seconds=600.0)
        joining.__enter__()
    entered, leave, thread = in_background(lease.using(TRAINING))
    now[0] = 599.0
    with lease._changed:
        lease._changed.notify_all()
    assert not entered.wait(0.05) and thread.is_alive(), "far beyond the 10 s of the loop, within those of the join"
    joining.__exit__(None, None, None)
    assert entered.wait(30)
    leave.set()
    thread.join(30)


def test_a_join_that_uses_the_devices_for_longer_than_it_said_is_not_waited_for(moves):
    now = [0.0]
    lease = DeviceLease(moves, seconds=10.0, clock=lambda: now[0])
    with lease.using(GENERATING):
        joining = lease.shared(GENERATING, seconds=60.0)
        joining.__enter__()
    failures = []

    def train():
        try:
            lease.using(TRAINING).__enter__()
        except DeadlineExceeded as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive():
        now[0] += 10.0
        with lease._changed:
            lease._changed.notify_all()
        thread.join(0.01)
    joining.__exit__(None, None, None)
    assert "held by generating" in str(failures[0]) and now[0] >= 70.0
