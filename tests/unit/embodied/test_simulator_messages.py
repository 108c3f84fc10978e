"""Messages between an env worker and a simulator's process say the same after their way as arrays."""

from dataclasses import fields

import numpy as np
import pytest

from rl_core.envs.simulator_messages import (
    answer_from_arrays,
    answer_to_arrays,
    failure_from_arrays,
    failure_to_arrays,
    request_from_arrays,
    request_to_arrays,
)
from rl_core.messages.embodied import SimulatorAnswer, SimulatorChunk, SimulatorReset
from rl_core.messages.envs import EnvFailure

STATES = {"states": np.arange(3, dtype=np.float32), "a.b": np.array(2)}
MADE = {"rewards": (1.0, 0.5), "successes": (False, True)}
FRAMES = [np.full((2, 3, 3), number, np.uint8) for number in range(12)]


def same(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "answer",
    [
        SimulatorAnswer(obs=STATES),
        SimulatorAnswer(obs=STATES, frames=FRAMES),
        SimulatorAnswer(obs=STATES, **MADE),
        SimulatorAnswer(obs=STATES, **MADE, frames=FRAMES),
        SimulatorAnswer(obs=STATES, final_obs=STATES, terminated=True, **MADE),
        SimulatorAnswer(obs=STATES, final_obs=STATES, truncated=True, **MADE),
        SimulatorAnswer(
            obs=STATES, **MADE, intervene_actions=np.ones((3, 2)), intervene_flags=np.array([True, False, False])
        ),
    ],
)
def test_an_answer(answer):
    got = answer_from_arrays(answer_to_arrays(answer))
    assert all(same(getattr(answer, field.name), getattr(got, field.name)) for field in fields(answer))


@pytest.mark.parametrize(
    "request_",
    [SimulatorReset(seed=2**40), SimulatorReset(seed=1, record=True), SimulatorChunk(actions=np.ones((2, 3)), seed=7)],
)
def test_a_request(request_):
    got = request_from_arrays(request_to_arrays(request_))
    assert type(got) is type(request_)
    assert all(same(getattr(request_, field.name), getattr(got, field.name)) for field in fields(request_))


def test_a_failure():
    text = "step must return \u2026"
    assert failure_from_arrays(failure_to_arrays(EnvFailure(type="RolloutDataFailure", message=text))) == text
