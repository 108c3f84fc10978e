"""What the runner tidies up each second: prompts that no rollout survives are answered for, training ones by the ledger's budget."""

from types import SimpleNamespace

from rl_core.api.job import RLJobSpec
from rl_core.channel import Channel
from rl_core.runner.base import Runner
from rl_core.runner.validation import Validation


class Prompts:
    """Stands in for the prompts channel: `dead` items until they are acknowledged."""

    def __init__(self, *items):
        self.dead = list(items)

    def stats(self):
        return SimpleNamespace(name="prompts", depth=0, oldest_age_seconds=0.0, dead_items=len(self.dead))

    def dead_items(self):
        return [SimpleNamespace(item=item, ack=lambda item=item: self.dead.remove(item)) for item in self.dead]


class Loop(Runner):
    """A runner without processes, with one validation prompt under way."""

    def __init__(self, spec):
        self.cluster = SimpleNamespace(members=lambda role: [])
        self.given_back = []
        self.intake = SimpleNamespace(expire=lambda: None, give_back=lambda *told: self.given_back.append(told))
        self.trajectories, self.results = Channel.create("t", local=True), Channel.create("r", local=True)
        self.asked = Channel.create("p", local=True)
        self.validation = Validation(spec, [{"idx": 0}], prompts=self.asked, results=self.results)


def test_a_prompt_that_no_rollout_survives_is_given_back_or_counted_as_an_error():
    loop = Loop(RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}))
    train = {"mode": "train", "group_id": "0-7", "lease_token": "x.1.0-7"}

    def lost():
        if not loop.asked.empty():
            loop.prompts = Prompts(train, loop.asked.get())
            loop.housekeep()
        return False

    metrics = loop.validation.measure(3, cancelled=lost)
    assert metrics == {"val/errors": 1.0, "val/prompts": 1.0}
    assert loop.given_back == [("0-7", "x.1.0-7", "worker_lost", "its rollouts were lost each time")]
    assert loop.prompts.dead == []
