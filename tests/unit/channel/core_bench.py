"""A channel's core with a clock to turn, for tests of its rules."""

from rl_core.api.errors import ChannelClosed
from rl_core.channel.core import ChannelCore
from rl_core.channel.model import Put, Take
from rl_core.messages.channel import ChannelOptions


class Process:
    """A client of the core."""

    def __init__(self, name):
        self.name = name


class Bench:
    """A core with a clock to turn and faces that record what came of each operation."""

    def __init__(self, **options):
        self.now = 100.0
        self.dropped = []
        self.core = ChannelCore("c", ChannelOptions(**options), on_drop=self.dropped.append)
        self.process = Process("actor:0")

    def put(self, item, *, key="k", weight=0.0, nbytes=1, client=None, timeout=600.0, nowait=False):
        outcome = []

        def store(put):
            try:
                self.core.store(self.now, put, item, weight)
                outcome.append("stored")
            except ChannelClosed as error:
                outcome.append(error)

        put = Put(client or self.process, key, nbytes, store, outcome.append, self.now + timeout, self.now)
        self.core.put(self.now, put, nowait=nowait)
        return Operation(put, outcome)

    def reserve(self, key):
        """Return a put that has room and whose item is still to come."""
        put = Put(self.process, key, 1, lambda put: None, lambda error: None, 1e9, self.now)
        self.core.put(self.now, put)
        assert put.admitted
        return put

    def take(self, *, key="k", client=None, timeout=600.0, nowait=False, **options):
        outcome = []
        take = Take(
            client or self.process,
            key,
            lambda take, delivered: outcome.append(delivered),
            outcome.append,
            self.now + timeout,
            self.now,
            **options,
        )
        self.core.take(self.now, take, nowait=nowait)
        return Operation(take, outcome)

    def receive(self, **options):
        """get and confirm."""
        taken = self.take(**options)
        self.core.confirm(self.now, taken.tokens)
        return taken.items

    def pass_time(self, seconds):
        self.now += seconds
        self.core.tick(self.now)


class Operation:
    def __init__(self, waiting, outcome):
        self.waiting, self.outcome = waiting, outcome

    @property
    def done(self):
        return bool(self.outcome)

    @property
    def result(self):
        assert len(self.outcome) == 1, "an operation ends exactly once"
        return self.outcome[0]

    @property
    def items(self):
        return [delivery.payload for delivery in self.result]

    @property
    def tokens(self):
        return [delivery.token for delivery in self.result]
