"""Receivers that are slower than the others: the trainer does not wait for them, and they serve nothing but what is committed."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.weight_world import HASTY, Receiver, about, model, publisher, serves, source_of, started, tensors


@pytest.fixture
def busy():
    """A receiver whose rows do not end until its trap is cleared."""
    made = Receiver("rollout:9")
    with started(made):
        yield made


def late_of(source):
    return asyncio.run(source.late_receivers())


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_the_trainer_goes_on_and_a_late_receiver_gets_the_version_as_it_was(receivers, busy, transport):
    everybody = [*receivers, busy]
    with publisher(transport, deadlines=HASTY) as source:
        source.publish(1, model(1), about(everybody), 3)
        busy.call("set_trap", "busy")
        state = tensors(2)
        report = source.publish(2, source_of(state), about(everybody), 2)
        assert report.acked == ("rollout:0", "rollout:1") and report.late == ("rollout:9",) and report.failed == {}
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)
        assert busy.call("probe")["current"][0] == 1, "it still generates with the version before"
        for tensor in state.values():
            tensor.zero_()  # the next step of the trainer
        busy.call("set_trap", "")
        late = late_of(source)
        assert (late.version, late.acked, late.failed) == (2, ("rollout:9",), {})
        assert serves(busy, 2, tensors(2)) and busy.call("probe")["current"] == [2, report.digest]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_receiver_that_is_still_late_at_the_next_version_takes_that_one(receivers, busy, transport):
    everybody = [*receivers, busy]
    with publisher(transport, deadlines=HASTY) as source, ThreadPoolExecutor(1) as pool:
        source.publish(1, model(1), about(everybody), 3)
        busy.call("set_trap", "busy")
        loads = busy.call("probe")["loads"]
        source.publish(2, model(2), about(everybody), 2)
        waiting = pool.submit(late_of, source)
        assert source.publish(3, model(3), about(everybody), 2).late == ("rollout:9",)
        former = waiting.result(120)
        assert former.acked == () and former.failed == {}, "it has not failed: a newer version is on its way to it"
        busy.call("set_trap", "")
        assert late_of(source).acked == ("rollout:9",)
        assert serves(busy, 3, tensors(3)) and busy.call("probe")["loads"] == loads + 1
        assert len(source.publish(4, model(4), about(everybody), 3).acked) == 3


def test_a_late_receiver_that_fails_is_named(receivers, busy):
    everybody = [*receivers, busy]
    with publisher(deadlines=HASTY) as source:
        source.publish(1, model(1), about(everybody), 3)
        busy.call("set_trap", "busy")
        source.publish(2, model(2), about(everybody), 2)
        busy.process.kill()
        source.lost("rollout:9", "the hub declared it dead")
        assert "WorkerLost" in late_of(source).failed["rollout:9"]
        assert source.publish(3, model(3), about(receivers), 2).late == ()


def test_a_receiver_without_which_too_few_serve_is_waited_for(receivers, busy):
    everybody = [*receivers, busy]
    with publisher(deadlines=HASTY) as source, ThreadPoolExecutor(1) as pool:
        source.publish(1, model(1), about(everybody), 3)
        busy.call("set_trap", "busy")
        publishing = pool.submit(source.publish, 2, model(2), about(everybody), 3)
        while any(receiver.call("probe")["state"] != "applied" for receiver in receivers):
            assert not publishing.done()
        assert not any(serves(receiver, 2, tensors(2)) for receiver in receivers)
        busy.call("set_trap", "")
        assert len(publishing.result(120).acked) == 3


def test_receivers_that_share_devices_with_the_trainer_are_all_waited_for(receivers, busy):
    """They load before the trainer computes again, because it takes their place on the devices."""
    with (
        publisher("zmq", deadlines=HASTY, placement={"mode": "colocated"}) as source,
        ThreadPoolExecutor(1) as pool,
    ):
        busy.call("set_trap", "busy")
        publishing = pool.submit(source.publish, 1, model(1), about([*receivers, busy]), 2)
        while not all(serves(receiver, 1, tensors(1)) for receiver in receivers):
            assert not publishing.done()
        assert not publishing.done()
        busy.call("set_trap", "")
        assert len(publishing.result(120).acked) == 3


def test_a_publisher_closes_while_a_receiver_is_late(receivers, busy):
    with publisher(deadlines=HASTY) as source:
        busy.call("set_trap", "busy")
        assert source.publish(1, model(1), about([*receivers, busy]), 2).late == ("rollout:9",)
    busy.call("set_trap", "")
    with publisher(deadlines=HASTY) as source:
        source.publish(1, model(1), about([*receivers, busy]), 3)
    assert serves(busy, 1, tensors(1))
