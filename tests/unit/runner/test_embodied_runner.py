"""When the embodied programs request the next collection."""

from types import SimpleNamespace

import pytest

from rl_core.runner.embodied import AsyncEmbodiedRunner, EmbodiedRunner


def request(kind, *, step=3, every=100, devices=None, envs=2, staleness=1):
    """Return (step, version) of the collections that a program requests during the training of step `step` + 1."""
    program, begun, written = object.__new__(kind), [], []
    program.progress = SimpleNamespace(step=step, version=step)
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
