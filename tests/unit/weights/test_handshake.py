"""The gate commits when all live receivers applied, or when enough did and the others are slow; never with too few.

A handshake ends for who announces something else, is late or dies.
"""

import asyncio
from concurrent.futures import Future

import pytest

from rl_core.api.errors import DeadlineExceeded, WorkerLost
from rl_core.messages.weights import (
    ReceiverAck,
    ReceiverApplied,
    ReceiverFailure,
    ReceiverReady,
    SharedSource,
    WeightOffer,
    WeightTransfer,
)
from rl_core.weights.handshake import CommitGate, Handshake, HandshakeState


class FakeHandshake:
    """Where one receiver stands."""

    def __init__(self, counts=True):
        self.live, self.applied, self.acknowledged, self.counts = True, False, False, counts

    def apply(self):
        self.live, self.applied = False, True

    def acknowledge(self):
        self.acknowledged = True

    def fail(self):
        self.live = self.applied = False


def gate_of(count, min_acks, straggler_seconds=60.0):
    opened = []
    gate = CommitGate(
        min_acks=min_acks,
        straggler_seconds=straggler_seconds,
        opened=lambda: opened.append(True),
    )
    gate.handshakes = [FakeHandshake() for _ in range(count)]
    gate.check()
    return gate, gate.handshakes, opened


def decided(gate):
    return gate._decision.done()


async def test_all_live_receivers_must_apply():
    gate, (first, second), opened = gate_of(2, 1)
    first.apply()
    gate.check()
    assert not decided(gate)
    second.apply()
    gate.check()
    assert await gate.wait() and opened == [True]


async def test_a_dead_receiver_is_not_waited_for():
    gate, (first, second), _ = gate_of(2, 1)
    second.fail()
    first.apply()
    gate.check()
    assert await gate.wait()


async def test_too_few_do_not_commit():
    gate, (first, second), opened = gate_of(2, 2)
    first.apply()
    second.fail()
    gate.check()
    assert not await gate.wait() and opened == []


async def test_a_slow_receiver_does_not_hold_enough_others_beyond_the_grace():
    gate, handshakes, opened = gate_of(3, 2, straggler_seconds=0.01)
    handshakes[0].apply()
    gate.check()
    await asyncio.sleep(0.03)
    assert not decided(gate)  # one is not enough, however long it waits
    handshakes[1].apply()
    gate.check()
    assert await gate.wait() and opened == [True] and handshakes[2].live


async def opened_before_the_third_applied(*, min_acks):
    """Return a gate that is open because two of three receivers applied the version, and its handshakes."""
    gate, handshakes, _ = gate_of(3, min_acks, straggler_seconds=0.01)
    for handshake in handshakes[:2]:
        handshake.apply()
    gate.check()
    assert await gate.wait()
    return gate, handshakes


async def test_a_sync_is_settled_when_enough_serve_and_nobody_is_between_load_and_acknowledgement():
    gate, (first, second, slow) = await opened_before_the_third_applied(min_acks=1)
    first.acknowledge()
    gate.check()
    assert not gate.settled.done()
    second.acknowledge()
    gate.check()
    assert gate.settled.done() and slow.live


async def test_a_sync_with_too_few_who_acknowledge_waits_for_the_slow_ones():
    gate, (first, second, slow) = await opened_before_the_third_applied(min_acks=2)
    first.acknowledge()
    second.fail()
    gate.check()
    assert not gate.settled.done()
    slow.apply()
    gate.check()
    assert not gate.settled.done()
    slow.acknowledge()
    gate.check()
    assert gate.settled.done()


async def test_only_receivers_that_count_make_a_version_safe_to_commit():
    gate, handshakes, opened = gate_of(2, 1, straggler_seconds=0.01)
    handshakes[0].counts = False
    handshakes[0].apply()
    gate.check()
    await asyncio.sleep(0.03)
    assert not decided(gate)
    handshakes[1].fail()
    gate.check()
    assert not await gate.wait() and opened == []


@pytest.mark.parametrize(("min_acks", "committed"), [(0, True), (1, False)])
async def test_without_receivers_only_a_sync_that_needs_none_commits(min_acks, committed):
    gate, _, opened = gate_of(0, min_acks)
    assert await gate.wait() is committed and opened == [True] * committed


class Client:
    """Answers in order with what it was given; raises what is an error."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def call_future(self, method, *args, timeout):
        future = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    async def call(self, method, *args, timeout):
        return self.call_future(method, timeout=timeout).result()


OFFER = WeightOffer(digest="new", manifest=b"", bucket_bytes=1, deadline=1.0)
TRANSFER = WeightTransfer(digest="new", source=SharedSource(segment="s", nbytes=1))
READY, APPLIED = ReceiverReady(have=(-1, ""), devices=("cpu",)), ReceiverApplied(version=2, digest="new", loaded=True)


async def talk(*answers):
    """Return the handshake with a receiver that gives these answers to OFFER, TRANSFER and COMMIT."""
    handshake = Handshake(name="rollout:0", client=Client(*answers), host_token="h")
    handshake.start(OFFER, 1.0)
    await handshake.offered()
    if handshake.live:
        await handshake.transfer(TRANSFER, 1.0)
    if handshake.state is HandshakeState.APPLIED:
        await handshake.commit(2, "new", 1.0)
    return handshake


async def test_a_receiver_that_proves_and_acknowledges_the_version_serves_it():
    handshake = await talk(READY, APPLIED, ReceiverAck(version=2, digest="new"))
    assert handshake.state is HandshakeState.ACKED and handshake.transport == "shared"


@pytest.mark.parametrize(
    "answers",
    [
        [ReceiverAck(version=1, digest="old")],
        [ReceiverApplied(version=2, digest="old", loaded=False)],
        [READY, ReceiverApplied(version=2, digest="old", loaded=True)],
        [READY, APPLIED, ReceiverAck(version=2, digest="old")],
    ],
    ids=["has it", "loaded it", "applied it", "serves it"],
)
async def test_a_receiver_that_announces_another_version_is_out(answers):
    handshake = await talk(*answers)
    assert handshake.state is HandshakeState.FAILED
    assert "with digest old, offered was new" in handshake.describe()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["offered", "ready", "applied"])
@pytest.mark.parametrize("error", [DeadlineExceeded("not answered within 1 s"), WorkerLost("it is dead")])
async def test_a_receiver_that_misses_its_deadline_or_dies_is_out_with_its_last_state(at, error):
    answers = [READY, APPLIED][:at]
    handshake = await talk(*answers, error)
    state = ["offered, not ready", "ready, not applied", "committed, not acknowledged"][at]
    assert handshake.state is HandshakeState.FAILED and not handshake.applied
    assert handshake.reason == f"{state}: {type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("answer", "opened"),
    [
        (ReceiverApplied(version=2, digest="new", loaded=True, opened=(0, 1)), {0, 1}),
        (ReceiverFailure(names=(), reason="one cannot map", aborted=True, opened=(1,)), {1}),
        (WorkerLost("it is dead"), set()),
        (DeadlineExceeded("not answered within 1 s"), None),
    ],
    ids=["applied", "failed", "ended", "silent"],
)
async def test_which_handles_a_receiver_holds_open_is_known_unless_it_is_silent(answer, opened):
    handshake = Handshake(name="rollout:0", client=Client(READY, answer), host_token="h")
    handshake.start(OFFER, 1.0)
    await handshake.offered()
    await handshake.transfer(TRANSFER, 1.0)
    assert handshake.opened == opened


async def test_bytes_of_another_receiver_that_do_not_hold_leave_it_to_be_offered_again():
    handshake = Handshake(name="rollout:0", client=Client(READY), host_token="h")
    handshake.start(OFFER, 1.0)
    await handshake.offered()
    handshake.client.answers = [ReceiverFailure(names=("a",), reason="1 tensors do not have the checksum")]
    await handshake.transfer(TRANSFER, 1.0, relayed=True)
    assert handshake.live and handshake.reason == "1 tensors do not have the checksum" and not handshake.relayed
