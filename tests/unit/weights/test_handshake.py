"""The gate commits when all live receivers applied, or when enough did and the others are slow; never with too few."""

import asyncio

import pytest

from rl_core.weights.handshake import Gate


class FakeHandshake:
    """Where one receiver stands."""

    def __init__(self):
        self.live, self.applied = True, False

    def apply(self):
        self.live, self.applied = False, True

    def fail(self):
        self.live = False


def gate_of(count, min_acks, straggler_seconds=60.0):
    opened = []
    gate = Gate(
        min_acks=min_acks,
        straggler_seconds=straggler_seconds,
        opened=lambda: opened.append(True),
    )
    gate.handshakes = [FakeHandshake() for _ in range(count)]
    gate.look()
    return gate, gate.handshakes, opened


def decided(gate):
    return gate._decision.done()


async def test_all_live_receivers_must_apply():
    gate, (first, second), opened = gate_of(2, 1)
    first.apply()
    gate.look()
    assert not decided(gate)
    second.apply()
    gate.look()
    assert await gate.wait() and opened == [True]


async def test_a_dead_receiver_is_not_waited_for():
    gate, (first, second), _ = gate_of(2, 1)
    second.fail()
    first.apply()
    gate.look()
    assert await gate.wait()


async def test_too_few_do_not_commit():
    gate, (first, second), opened = gate_of(2, 2)
    first.apply()
    second.fail()
    gate.look()
    assert not await gate.wait() and opened == []


async def test_a_slow_receiver_does_not_hold_enough_others_beyond_the_grace():
    gate, handshakes, opened = gate_of(3, 2, straggler_seconds=0.01)
    handshakes[0].apply()
    gate.look()
    await asyncio.sleep(0.03)
    assert not decided(gate)  # one is not enough, however long it waits
    handshakes[1].apply()
    gate.look()
    assert await gate.wait() and opened == [True] and handshakes[2].live


@pytest.mark.parametrize(("min_acks", "committed"), [(0, True), (1, False)])
async def test_without_receivers_only_a_sync_that_needs_none_commits(min_acks, committed):
    gate, _, opened = gate_of(0, min_acks)
    assert await gate.wait() is committed and opened == [True] * committed
