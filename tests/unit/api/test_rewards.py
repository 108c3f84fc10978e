"""What user code may return as the reward of a sample, and how rewards by name become one."""

import types

import pytest

from rl_core.api.errors import RolloutConfigError
from rl_core.api.rewards import read_reward, total_reward


@pytest.mark.parametrize(
    "returned",
    [
        "1",
        {"score": 1},
        {"reward": "1"},
        {"reward": 1, "parts": [1]},
        {"reward": 1, "parts": {"reward": 1}},
        float("inf"),
        object(),
    ],
)
def test_what_is_no_reward_is_refused(returned):
    with pytest.raises(ValueError, match=r"reward"):
        read_reward(returned)


def test_rewards_have_three_forms():
    result = types.SimpleNamespace(reward=2, parts={"a": 1, "b": None})
    assert read_reward(0.5) == (0.5, {})
    assert read_reward({"reward": None}) == (None, {})
    assert read_reward(result) == (2.0, {"a": 1.0})


def test_the_reward_is_the_one_of_that_name_or_the_weighted_sum():
    weights = {"right": 2.0, "short": 0.5}
    assert total_reward({"right": 1.0, "short": 3.0}, weights) == ({"right": 1.0, "short": 3.0}, 3.5)
    assert total_reward({"right": None, "short": 3.0}, weights) == ({"short": 3.0}, 1.5)
    assert total_reward({"right": None, "short": None}, weights) == ({}, None)
    assert total_reward({"reward": 7.0, "right": 1.0}, {}) == ({"right": 1.0}, 7.0)
    assert total_reward({"reward": None, "right": 1.0}, {}) == ({"right": 1.0}, None)
    with pytest.raises(RolloutConfigError, match="got none for length, right"):
        total_reward({"right": 1.0, "length": 3.0}, {"other": 1.0})
