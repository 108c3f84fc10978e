"""The core against a brute-force model: random histories, compared after every step.

The model keeps the accepted items of each key in a plain list and replays the waiting puts and takes from scratch each time. It
knows nothing of tokens or callbacks; what it says about who has which items, and in which order they stand, must hold.
"""

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_core.api.errors import DeadlineExceeded
from rl_core.channel.core import ChannelCore
from rl_core.channel.model import Put, Take
from rl_core.messages.channel import ChannelOptions

KEYS = ("k", "l")
WEIGHTS = (0.0, 0.1, 0.3, 1.0, 2.0, 5.0)
GOALS = (None, 0.0, 0.3, 0.6, 1.0, 3.0, 6.0)


class Process:
    def __init__(self, name):
        self.name = name


class ModelKey:
    """stored: items in the order of acceptance; puts, waits: operations in the order they came; filling: whose put is to come."""

    def __init__(self, maxsize):
        self.maxsize = maxsize
        self.stored, self.puts, self.waits, self.filling = [], [], [], {}

    def put_back(self, items, order):
        self.stored = sorted([*self.stored, *items], key=lambda item: order[item])

    def run(self, accept, ended):
        """Let puts in and serve waits until nothing moves."""
        while self.let_in(accept) or self.serve(ended):
            pass

    def let_in(self, accept):
        for put in self.puts:
            if put["client"] in self.filling:
                continue
            if self.maxsize and len(self.stored) + len(self.filling) >= self.maxsize:
                return False
            self.puts.remove(put)
            if put["large"]:
                self.filling[put["client"]] = put
            else:
                accept(put, self)
            return True
        return False

    def serve(self, ended):
        if not self.waits or not self.stored:
            return False
        wait = self.waits[0]
        if self.satisfied(wait):
            self.waits.pop(0)
            ended(wait)
        return True

    def satisfied(self, wait):
        while self.stored:
            head = self.stored[0]
            if wait["goal"] is None:
                wait["held"] += self.stored[: wait["most"]]
                del self.stored[: wait["most"]]
                return True
            total = float(sum(Fraction(weight) for _, weight in [*wait["held"], head]))
            if total > wait["goal"]:
                if wait["oversize"] and not wait["held"]:
                    wait["held"].append(self.stored.pop(0))
                return True
            wait["held"].append(self.stored.pop(0))
            if total >= wait["goal"]:
                return True
        return False


class ChannelMachine(RuleBasedStateMachine):
    @initialize(maxsize=st.integers(0, 2))
    def begin(self, maxsize):
        self.now = 0.0
        self.core = ChannelCore("c", ChannelOptions(maxsize=maxsize))
        self.keys = {key: ModelKey(maxsize) for key in KEYS}
        self.clients = [Process("a"), Process("b")]
        self.count = 0
        self.order = {}
        """Place in the order of acceptance, by item."""
        self.puts, self.takes = {}, {}
        """Operations that have not ended: number -> (the core's, the model's)."""
        self.given, self.expected, self.late = {}, {}, set()
        self.out = {}
        """Token -> (item, client, key)."""
        self.gone, self.never = set(), set()

    def number(self):
        self.count += 1
        return self.count

    # --- doing ---

    @rule(key=st.sampled_from(KEYS), weight=st.sampled_from(WEIGHTS), who=st.integers(0, 1), large=st.booleans())
    def put(self, key, weight, who, large):
        number, client = self.number(), self.clients[who]
        wait = {"number": number, "item": (number, weight), "client": client, "large": large, "key": key}

        def on_room(put):
            if not large:
                self.core.store(self.now, put, wait["item"], weight)

        put = Put(client, key, 1, on_room, self.fail, 1e9, self.now)
        self.puts[number] = put, wait
        self.core.put(self.now, put)
        self.keys[key].puts.append(wait)
        self.settle(key)

    @precondition(lambda self: any(put.admitted for put, _ in self.puts.values()))
    @rule(data=st.data())
    def hand_over(self, data):
        number = data.draw(st.sampled_from([number for number, (put, _) in self.puts.items() if put.admitted]))
        put, wait = self.puts[number]
        self.core.store(self.now, put, wait["item"], wait["item"][1])
        del self.keys[put.key].filling[put.client]
        self.accept(wait, self.keys[put.key])
        self.settle(put.key)

    @precondition(lambda self: self.puts)
    @rule(data=st.data())
    def cancel_put(self, data):
        put, wait = self.puts.pop(data.draw(st.sampled_from(sorted(self.puts))))
        self.core.cancel_put(self.now, put)
        self.forget_put(wait)
        self.settle(put.key)

    @rule(
        key=st.sampled_from(KEYS), goal=st.sampled_from(GOALS), oversize=st.booleans(), who=st.integers(0, 1),
        seconds=st.sampled_from([5.0, 1e9]), most=st.integers(1, 3),
    )  # fmt: skip
    def take(self, key, goal, oversize, who, seconds, most):
        number, client = self.number(), self.clients[who]

        def on_items(take, deliveries):
            self.given[number] = [delivery.payload for delivery in deliveries]
            self.out.update({delivery.token: (delivery.payload, client, key) for delivery in deliveries})

        def on_error(error):
            assert isinstance(error, DeadlineExceeded)
            self.late.add(number)

        take = Take(client, key, on_items, on_error, self.now + seconds, self.now, goal, most, oversize)
        wait = {"number": number, "goal": goal, "most": most, "oversize": oversize, "held": []}
        self.takes[number] = take, wait
        self.core.take(self.now, take)
        self.keys[key].waits.append(wait)
        self.settle(key)

    @precondition(lambda self: self.takes)
    @rule(data=st.data())
    def cancel_take(self, data):
        take, wait = self.takes.pop(data.draw(st.sampled_from(sorted(self.takes))))
        self.core.cancel_take(self.now, take)
        self.forget_take(take.key, wait)
        self.settle(take.key)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), confirms=st.booleans())
    def finish(self, data, confirms):
        token = data.draw(st.sampled_from(sorted(self.out)))
        item, _, key = self.out.pop(token)
        for _ in range(2):  # what is said twice is done once
            (self.core.confirm if confirms else self.core.requeue)(self.now, [token])
        if confirms:
            self.gone.add(item)
        else:
            self.keys[key].put_back([item], self.order)
        self.settle(key)

    @rule(who=st.integers(0, 1))
    def client_dies(self, who):
        client = self.clients[who]
        self.clients[who] = Process(client.name)
        self.core.client_lost(self.now, client)
        for number, (put, wait) in [entry for entry in self.puts.items() if entry[1][0].client is client]:
            self.puts.pop(number)
            self.forget_put(wait)
            if put.admitted:  # the server gives its room up
                self.core.cancel_put(self.now, put)
        for number in [number for number, (take, _) in self.takes.items() if take.client is client]:
            take, wait = self.takes.pop(number)
            self.forget_take(take.key, wait)
        for token in [token for token, (_, owner, _) in self.out.items() if owner is client]:
            item, _, key = self.out.pop(token)
            self.keys[key].put_back([item], self.order)
        for key in KEYS:
            self.settle(key)

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds
        due = [number for number, (take, _) in self.takes.items() if take.deadline <= self.now]
        for number in sorted(due, key=lambda number: (self.takes[number][0].deadline, number)):
            if number in self.takes:  # else what one before it held came to it
                take, wait = self.takes.pop(number)
                self.forget_take(take.key, wait)
                self.settle(take.key)
        self.core.tick(self.now)

    # --- comparing ---

    def forget_put(self, wait):
        model = self.keys[wait["key"]]
        if wait in model.puts:
            model.puts.remove(wait)
        else:
            del model.filling[wait["client"]]
        self.never.add(wait["item"])

    def forget_take(self, key, wait):
        self.keys[key].waits.remove(wait)
        self.keys[key].put_back(wait["held"], self.order)

    def accept(self, wait, model):
        self.order[wait["item"]] = len(self.order)
        model.stored.append(wait["item"])
        self.puts.pop(wait["number"])

    def settle(self, key):
        def ended(wait):
            self.expected[wait["number"]] = wait["held"]
            self.takes.pop(wait["number"])

        self.keys[key].run(self.accept, ended)

    @staticmethod
    def fail(error):
        raise AssertionError(error)

    @invariant()
    def the_same_takes_ended_with_the_same_items(self):
        assert self.given == self.expected
        assert not self.late & (set(self.takes) | set(self.given))

    @invariant()
    def the_same_puts_have_room(self):
        assert {n for n, (put, _) in self.puts.items() if put.admitted} == {
            put["number"] for model in self.keys.values() for put in model.filling.values()
        }

    @invariant()
    def the_queues_stand_in_the_order_of_acceptance_and_idle_keys_are_forgotten(self):
        for key, model in self.keys.items():
            queue = self.core._keys.get(key)
            assert [item.payload for item in (queue.items if queue else ())] == model.stored
            assert (queue is not None) == bool(model.stored or model.puts or model.waits or model.filling)

    @invariant()
    def no_item_is_lost_or_doubled(self):
        places = [item for item, _, _ in self.out.values()] + [*self.gone, *self.never]
        for model in self.keys.values():
            places += [*model.stored, *(item for wait in model.waits for item in wait["held"])]
            places += [put["item"] for put in (*model.puts, *model.filling.values())]
        assert len(places) == len(set(places)) and set(self.order) <= set(places)
        filling = sum(len(model.filling) for model in self.keys.values())
        assert self.core.bytes == len(self.order) - len(self.gone) + filling

    @invariant()
    def the_next_deadline_is_known(self):
        assert self.core.next_due() == min(
            [put.deadline for put, _ in self.puts.values() if not put.admitted]
            + [take.deadline for take, _ in self.takes.values()],
            default=float("inf"),
        )


ChannelMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestChannelAgainstBruteForce = ChannelMachine.TestCase
