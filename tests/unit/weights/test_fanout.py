"""The tree of `weights.fanout`: who gives to whom, by a simulator of 256 receivers over links, with deaths.

A sender's link carries its streams at like shares of one copy a second; a receiver's own link is as fast. Time is the simulator's.
"""

import asyncio
import heapq
import random
from types import SimpleNamespace

import pytest

from rl_core.api.errors import WorkerLost
from rl_core.messages.weights import BulkTicket, ReceiverRefusal, StreamSource
from rl_core.weights.fanout import PUBLISHER, RelayPool, RelaySlots
from rl_core.weights.handshake import HandshakeState

RECEIVERS = 256
STREAM = StreamSource(ticket=BulkTicket(address="tcp://h:1", ticket=b"t", key=b"k"), encrypted=False)


class Simulation:
    """Serves everybody by the tree; each of `deaths` is (when, receiver), and what it was giving fails then."""

    def __init__(self, fanout, deaths=()):
        self.tree, self.fanout = RelaySlots(fanout), fanout
        self.waiting = [f"rollout:{i}" for i in range(RECEIVERS)]
        self.events = [(when, number, "death", name, None) for number, (when, name) in enumerate(deaths)]
        heapq.heapify(self.events)
        self.served, self.dead, self.busy = {}, set(), {}
        self.copies_of_publisher = 0

    def run(self):
        """Return when the last living receiver has the version."""
        now, number = 0.0, len(self.events)
        while True:
            while self.waiting and (sender := self.tree.acquire()) is not None:
                receiver = self.waiting.pop(0)
                self.busy[receiver] = sender
                assert sum(one == sender for one in self.busy.values()) <= self.fanout
                assert sender == PUBLISHER or (sender in self.served and sender not in self.dead)
                self.copies_of_publisher += sender == PUBLISHER
                heapq.heappush(self.events, (now + self.fanout, number, "done", receiver, sender))
                number += 1
            if not self.busy and not self.waiting:
                return max(self.served.values())
            now, _, what, name, sender = heapq.heappop(self.events)
            if what == "death":
                self.die(name)
            elif self.busy.get(name) == sender:
                del self.busy[name]
                self.tree.release(sender)
                self.served[name] = now
                self.tree.add(name)

    def die(self, name):
        self.dead.add(name)
        self.tree.remove(name)
        self.waiting = [one for one in self.waiting if one != name]
        if (sender := self.busy.pop(name, None)) is not None:
            self.tree.release(sender)
        for child in [child for child, giver in self.busy.items() if giver == name]:
            del self.busy[child]
            self.waiting.insert(0, child)


@pytest.mark.parametrize(("fanout", "seconds"), [(1, 8.1), (2, 12.1), (4, 16.1), (8, 24.1)])
def test_256_receivers_are_served_in_the_time_of_a_few_copies_where_a_star_needs_256(fanout, seconds):
    simulation = Simulation(fanout)
    # Who has it serves `fanout` more in the time of `fanout` copies: the number grows by 1 + fanout.
    assert simulation.run() <= seconds + fanout
    assert len(simulation.served) == RECEIVERS and simulation.copies_of_publisher <= seconds


@pytest.mark.parametrize("fanout", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_living_receiver_is_served_whoever_dies_when(fanout, seed):
    chance = random.Random(seed)
    names = [f"rollout:{i}" for i in chance.sample(range(RECEIVERS), 40)]
    simulation = Simulation(fanout, [(chance.uniform(0, 12), name) for name in names])
    time = simulation.run()
    assert simulation.served.keys() | simulation.dead == {f"rollout:{i}" for i in range(RECEIVERS)}
    assert time <= 3 * Simulation(fanout).run()


def test_without_a_single_living_peer_the_publisher_serves_one_after_the_other():
    tree = RelaySlots(1)
    for _ in range(3):
        assert tree.acquire() == PUBLISHER and tree.acquire() is None
        tree.remove(PUBLISHER)
        tree.release(PUBLISHER)


class Peer:
    """A receiver that has the version, as the publisher sees it."""

    def __init__(self, name, answer=STREAM, state=HandshakeState.ACKED):
        self.name, self.state, self.asked = name, state, []

        async def call(method, digest, encrypted, timeout):
            self.asked.append((method, digest))
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.client = SimpleNamespace(call=call)


async def test_a_receiver_waits_for_room_and_is_then_given_to_by_one_that_has_the_version():
    relays, peer = RelayPool(1), Peer("rollout:0")
    async with relays.sender("d") as first:
        assert first is None
        waiting = asyncio.ensure_future(anext(aiter_of(relays)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await relays.joined("d", peer)
        assert await waiting is peer
    assert await relays.stream(peer) is STREAM and peer.asked == [("weights_relay", "d")]


async def aiter_of(relays):
    async with relays.sender("d") as peer:
        yield peer


@pytest.mark.parametrize("answer", [ReceiverRefusal(reason="not proven here"), WorkerLost("it is dead")])
async def test_who_gives_nothing_is_asked_no_more_and_that_is_told(answer, caplog):
    relays, peer = RelayPool(2), Peer("rollout:0", answer)
    await relays.joined("d", peer)
    assert await relays.stream(peer) is None
    assert "rollout:0 does not pass the weights on, the publisher gives them" in caplog.text
    async with relays.sender("d") as sender:
        assert sender is None


async def test_joiners_get_it_from_those_that_serve_it_in_turns_and_from_nobody_of_another_version():
    relays, peers = (
        RelayPool(2),
        [Peer("rollout:0"), Peer("rollout:1"), Peer("rollout:2", state=HandshakeState.APPLIED)],
    )
    for peer in peers:
        await relays.joined("d", peer)
    assert [await relays.for_joiner("d") for _ in range(2)] == [STREAM, STREAM]
    assert [len(peer.asked) for peer in peers] == [1, 1, 0]
    assert await relays.for_joiner("other") is None
    async with relays.sender("e") as sender:  # a new version: nobody but the publisher has it
        assert sender is None
    assert await relays.for_joiner("d") is None
