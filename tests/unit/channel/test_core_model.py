"""The core against a brute-force model: random histories, compared after every step.

The model keeps the accepted items of one key in a plain list and replays the waiting takes from scratch each time. It knows
nothing of tokens or callbacks; what it says about who has which items, and in which order they stand, must hold.
"""

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_core.channel.core import ChannelCore
from rl_core.channel.model import ChannelOptions, Put, Take

LEASE = 10.0
MAX_ATTEMPTS = 3


class Process:
    def __init__(self, name):
        self.name = name


class Model:
    """stored: [(number, weight)] in order; waits: [kind, target, oversize, most, held numbers] in order."""

    def __init__(self):
        self.weights: dict[int, float] = {}
        self.attempts: dict[int, int] = {}
        self.stored: list[int] = []
        self.waits: list[dict] = []

    def add(self, number, weight):
        self.weights[number], self.attempts[number] = weight, 1
        self.stored.append(number)

    def put_back(self, numbers):
        self.stored = sorted([*self.stored, *numbers])

    def serve(self):
        """Return [(wait, numbers)] of the waits that end, in order."""
        ended = []
        while self.waits:
            wait = self.waits[0]
            if not self.satisfied(wait):
                break
            ended.append((self.waits.pop(0), wait["held"]))
        return ended

    def satisfied(self, wait):
        while self.stored:
            head = self.stored[0]
            if wait["kind"] != "batch":
                most = wait["most"]
                wait["held"], self.stored = self.stored[:most], self.stored[most:]
                return True
            total = float(sum(Fraction(self.weights[number]) for number in [*wait["held"], head]))
            if total > wait["target"]:
                if wait["oversize"] and not wait["held"]:
                    wait["held"].append(self.stored.pop(0))
                return True
            wait["held"].append(self.stored.pop(0))
            if total >= wait["target"]:
                return True
        return False


class ChannelMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.core = ChannelCore("c", ChannelOptions(lease_seconds=LEASE, max_attempts=MAX_ATTEMPTS))
        self.model = Model()
        self.clients = [Process("a"), Process("b")]
        self.next_number = self.next_take = 0
        self.open: dict[int, tuple[Take, dict]] = {}
        self.given: dict[int, list[tuple[int, int]]] = {}
        self.expected: dict[int, list[tuple[int, int]]] = {}
        self.out: dict[str, tuple[int, Process, float | None]] = {}
        self.dead: set[int] = set()
        self.acked: set[int] = set()

    # --- doing ---

    @rule(weights=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0, 5.0]), min_size=1, max_size=3))
    def put(self, weights):
        numbers = range(self.next_number, self.next_number + len(weights))
        self.next_number += len(weights)
        contents = list(zip(numbers, weights, strict=True))

        def store(put):
            self.core.store(self.now, put, contents)

        put = Put(self.clients[0], "k", (1,) * len(weights), store, self.fail, 1e9, self.now)
        self.core.put(self.now, put)
        for number, weight in contents:
            self.model.add(number, weight)
        self.settle()

    @rule(
        kind=st.sampled_from(["get", "lease", "batch"]),
        goal=st.sampled_from([0.0, 0.3, 0.6, 1.0, 3.0, 6.0]),
        oversize=st.booleans(),
        most=st.integers(1, 3),
        who=st.integers(0, 1),
    )
    def take(self, kind, goal, oversize, most, who):
        identity, self.next_take = self.next_take, self.next_take + 1
        client = self.clients[who]

        def on_items(take, delivered):
            self.given[identity] = [(entry.item.attempt, entry.item.payload) for entry in delivered]
            for entry in delivered:
                self.out[entry.token] = (entry.item.payload, client, self.now + LEASE if kind == "lease" else None)

        take = Take(client, "k", kind, on_items, self.fail, 1e9, self.now, goal, oversize, most=most)
        wait = {"kind": kind, "target": goal, "oversize": oversize, "most": most, "held": [], "id": identity}
        self.open[identity] = (take, wait)
        self.core.take(self.now, take)
        self.model.waits.append(wait)
        self.settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel_waiting(self, data):
        identity = data.draw(st.sampled_from(sorted(self.open)))
        take, wait = self.open.pop(identity)
        self.core.cancel_take(self.now, take)
        self.model.waits.remove(wait)
        self.model.put_back(wait["held"])
        self.settle()

    @precondition(lambda self: self.out)
    @rule(data=st.data(), how=st.sampled_from(["ack", "nack", "confirm"]))
    def finish(self, data, how):
        token = data.draw(st.sampled_from(sorted(self.out)))
        number, _, expires = self.out[token]
        if how == "confirm" and expires is not None:
            self.core.confirm(self.now, [token])  # receipts do not end leases
            return
        del self.out[token]
        if how == "nack":
            assert self.core.nack(self.now, token)
            self.model.put_back([number])
        else:
            assert self.core.ack(self.now, token) if how == "ack" else self.core.confirm(self.now, [token]) is None
            self.acked.add(number)
        assert self.core.ack(self.now, token) is False
        self.settle()

    @rule(who=st.integers(0, 1))
    def client_dies(self, who):
        client = self.clients[who]
        self.clients[who] = Process(client.name)
        self.core.client_lost(self.now, client)
        for identity in [identity for identity, (take, _) in self.open.items() if take.client is client]:
            _, wait = self.open.pop(identity)
            self.model.waits.remove(wait)
            self.model.put_back(wait["held"])
        self.lose([token for token, entry in self.out.items() if entry[1] is client])
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.core.tick(self.now)
        self.lose([token for token, entry in self.out.items() if entry[2] is not None and entry[2] <= self.now])
        self.settle()

    # --- comparing ---

    def lose(self, tokens):
        for number in sorted(self.out.pop(token)[0] for token in tokens):
            self.model.attempts[number] += 1
            if self.model.attempts[number] > MAX_ATTEMPTS:
                self.dead.add(number)
            else:
                self.model.put_back([number])

    def settle(self):
        for wait, numbers in self.model.serve():
            self.expected[wait["id"]] = [(self.model.attempts[number], number) for number in numbers]
            self.open.pop(wait["id"], None)

    @staticmethod
    def fail(error):
        raise AssertionError(error)

    @invariant()
    def the_same_takes_ended_with_the_same_items(self):
        assert self.given == self.expected

    @invariant()
    def the_queue_stands_in_the_order_of_acceptance(self):
        queue = self.core._keys.get("k")
        assert [item.payload for item in (queue.items if queue else ())] == self.model.stored
        assert (queue is not None) == bool(self.model.stored or self.model.waits), "what holds nothing is forgotten"
        assert self.core.depth("k") == len(self.model.stored)

    @invariant()
    def no_item_is_lost_or_doubled(self):
        held = [number for _, wait in self.open.values() for number in wait["held"]]
        places = [*self.model.stored, *held, *(entry[0] for entry in self.out.values()), *self.acked, *self.dead]
        assert sorted(places) == list(range(self.next_number))
        assert {item.payload for _, item in self.core.dead_items("k")} == self.dead
        assert self.core.bytes == self.next_number - len(self.acked) - len(self.dead)


ChannelMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestChannelAgainstBruteForce = ChannelMachine.TestCase
