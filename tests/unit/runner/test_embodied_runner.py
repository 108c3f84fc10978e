"""When the embodied programs request the next collection."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rl_core.api.embodied import check_job
from rl_core.api.errors import ConfigError
from rl_core.runner.embodied import AsyncEmbodiedRunner, EmbodiedRunner
from tests.unit.embodied.test_refused_fields import job


def request(kind, *, step=3, every=100, devices=None, envs=2, staleness=1):
    """Return (step, version) of the collections that a program requests during the training of step `step` + 1."""
    program, begun, written = object.__new__(kind), [], []
    program.progress, program.sync = SimpleNamespace(step=step, version=step), SimpleNamespace(version=step)
    program._sync_interval = 1
    algorithm = SimpleNamespace(steps=50, max_staleness=staleness)
    spec = SimpleNamespace(algorithm=algorithm, validation=SimpleNamespace(every_steps=every))
    program.applied = SimpleNamespace(spec=spec)
    program.schedule = SimpleNamespace(devices=lambda: devices)
    roster = SimpleNamespace(
        count=lambda group: envs,
        serving=lambda group, version: 1,
        wanted=lambda group: ["a", "b"][: 2 if group == "env" else 1],
    )
    program.run = SimpleNamespace(roster=roster)
    program.report = SimpleNamespace(write=lambda: written.append(1))
    program.collection = SimpleNamespace(begin=lambda step, *, version: begun.append((step, version)))
    program.on_training()
    assert written == [1]
    return begun


@pytest.mark.parametrize(
    ("changes", "begun"),
    [
        ({}, [(5, 4)]),
        ({"every": 4}, []),
        ({"step": 49}, []),
        ({"devices": {"0": "actor"}}, []),
        ({"envs": 1}, []),
    ],
    ids=["next version", "an evaluation comes first", "the last step", "shared devices", "an env worker is missing"],
)
def test_the_next_collection_is_requested_during_training(changes, begun):
    assert request(EmbodiedRunner, **changes) == begun


def test_an_asynchronous_one_begins_with_the_current_version():
    assert request(AsyncEmbodiedRunner) == [(5, 3)] and request(AsyncEmbodiedRunner, step=49) == []


class Actor:
    """Records which methods are called."""

    def __init__(self):
        self.called = []

    def within(self, seconds):
        return self

    def __getattr__(self, method):
        return lambda *arguments: self.called.append(method) or method


def test_the_runner_asks_its_actors_for_nothing_with_tensors():
    """The thread that receives answers, and heartbeats, would load torch for them, which takes seconds."""
    program = object.__new__(EmbodiedRunner)
    program.actor, program.critic = Actor(), None
    program.progress = SimpleNamespace(step=3)
    deadlines = SimpleNamespace(deadlines=SimpleNamespace(rpc=1))
    spec = SimpleNamespace(algorithm=SimpleNamespace(max_staleness=0), runtime=deadlines)
    program.applied = SimpleNamespace(spec=spec)
    program.board = SimpleNamespace(during=lambda phase: nullcontext())
    program.schedule = SimpleNamespace(training=nullcontext)
    program.report = SimpleNamespace(measure=lambda part: nullcontext())
    program.stops = SimpleNamespace(
        cancelling=lambda cancel: nullcontext(),
        raise_if_stop_requested=lambda: None,
        wait=lambda result: [{"actor/loss": 1.0}],
    )
    program.on_training, program._age = lambda: None, 0
    assert program.train() == {"train/loss": 1.0}
    assert program.actor.called == ["run_training"]


class Steps:
    """Runs the steps of a program up to what members do: they collect at once, with the weights that were published last."""

    def __init__(self, kind, interval, *, every=10**6, steps=24, early=True):
        self.program = program = object.__new__(kind)
        self.published, self.ages, self.used, self.evaluated = [0], [], [], []
        program._sync_interval, program._ahead = interval, None
        program.progress = SimpleNamespace(step=0, version=0, reward=None)
        program.sync = SimpleNamespace(version=0, publish=self.publish)
        algorithm = SimpleNamespace(steps=steps, max_staleness=1)
        program.applied = SimpleNamespace(
            spec=SimpleNamespace(algorithm=algorithm, validation=SimpleNamespace(every_steps=every))
        )
        program.schedule = SimpleNamespace(devices=lambda: None, syncing=nullcontext)
        program.board = SimpleNamespace(during=lambda phase: nullcontext(), set=lambda **facts: None)
        program.report = SimpleNamespace(measure=lambda part: nullcontext(), write=lambda: None)
        present = (lambda group: 1) if early else (lambda group: 0)
        program.run = SimpleNamespace(
            roster=SimpleNamespace(count=present, serving=lambda group, version: 1, wanted=lambda group: ["a"])
        )
        program.handle_requests = program.await_members = lambda: None
        program.collection = self
        for step in range(1, steps + 1):
            program.gather()
            assert self.used[-1][0] == step, "trajectories of another step"
            self.ages.append(program.progress.version - self.used[-1][1])
            assert program._age == self.ages[-1], "the metric is the age"
            program.on_training()
            program.progress.step = program.progress.version = step
            program.publish()
            if program.evaluates_after(step):
                self.evaluated.append(program.sync.version == step)

    def publish(self, version):
        self.published.append(version)
        self.program.sync.version = version

    def begin(self, step, *, version):
        return SimpleNamespace(step=step, version=version) if self.program.run.roster.count("env") else None

    def settle(self, pending):
        return pending

    def is_intact(self, pending):
        return True

    def take(self, pending):
        assert pending.version in self.published
        self.used.append((pending.step, pending.version))
        return []

    def collect(self, step, *, at):
        self.used.append((step, self.program.sync.version))
        return []


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("early", [True, False], ids=["requested in training", "never requested early"])
@pytest.mark.parametrize("kind", [EmbodiedRunner, AsyncEmbodiedRunner])
def test_trajectories_are_as_old_as_the_interval_says_and_no_older(kind, early, interval):
    run = Steps(kind, interval, early=early)
    assert run.published == [0, *sorted({*range(interval, 25, interval), 24})]
    oldest = interval - 1 + (kind is AsyncEmbodiedRunner and early)
    assert max(run.ages) == oldest
    program = "embodied_async" if kind is AsyncEmbodiedRunner else "embodied"
    bound = interval - 1 + (kind is AsyncEmbodiedRunner)
    assert max(run.ages) <= bound

    def spec(staleness):
        return job(
            program=program,
            **{"algorithm.maxStaleness": staleness, "env.options": {"id": "x", "weightSyncInterval": interval}},
        )

    check_job(spec(bound))
    for wrong in [bound - 1] if bound else [1]:
        if wrong >= 0:
            with pytest.raises(
                ConfigError, match=f"algorithm.maxStaleness must be .* {interval}, got {wrong}; correct"
            ):
                check_job(spec(wrong))


@pytest.mark.parametrize("kind", [EmbodiedRunner, AsyncEmbodiedRunner])
def test_weights_that_are_evaluated_are_published_before(kind):
    run = Steps(kind, 4, every=6)
    assert run.evaluated == [True] * 4 and run.published == [0, 4, 6, 8, 12, 16, 18, 20, 24]
