"""Rewards by name, answers compared exactly, shaping."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms.registry import resolve
from rl_core.algorithms.rewards import (
    exact_reward,
    format_reward,
    math_reward,
    scale_rewards,
    shape_overlong,
    shape_stop_properly,
)
from rl_core.api.errors import DataError


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"first \boxed{3}, then \boxed{4}", "4"),
        (r"nested \boxed{\frac{1}{2}}", "0.5"),
        (r"cut off: \boxed{7} and \boxed{8", "7"),
        (r"\boxed{\boxed{9}}", "9"),
        (r"boxed beats #### 3 and 5: \boxed{2}", "2"),
        ("the marks #### 12\n#### 1,234.", "1234"),
        ("#### 72 \ntrailing words 3", "72"),
        ("so 3 apples and 4 pears make 7.", "7"),
        ("it is -5", "-5"),
        ("it is \N{MINUS SIGN}5", "-5"),
        ("either 3,4", "4"),
        ("I count 12, as asked", "12"),
        ("from 3-5", "5"),
        ("it costs $1,200.50!", "1200.5"),
        ("a share of 50%", "50"),
        ("ratio 3/4.", "0.75"),
        (r"slope -\frac{2}{4}", "-1/2"),
        (r"\boxed{\dfrac{-1}{3}}", "-1/3"),
        (r"\boxed{ \$ 12 }", "12"),
        (r"\boxed{0.10}", ".1"),
        (r"\boxed{North West}", "northwest"),
        (r"\boxed{1/0}", "1/0"),
        (r"\boxed{25\%}", "25"),
        ("I say 42", "worked solution\n#### 42"),
    ],
)
def test_right_answers(response, answer):
    assert math_reward(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("no number at all", "no number at all"),
        ("", ""),
        (r"\boxed{}", ""),
        (r"the answer 5 but \boxed{6}", "5"),
        ("0.333", "1/3"),
        ("0.1 + 0.2 = 0.30000000000000004", "0.3"),
        ("12,34", "1234"),
        ("it is \N{MINUS SIGN}5", "5"),
    ],
)
def test_wrong_answers(response, answer):
    assert math_reward(response, answer) == 0.0


def test_scores_are_chosen_by_the_caller():
    assert math_reward("1", "1", correct=2.0) == 2.0
    assert exact_reward(" yes\n", "yes", correct=3.0) == 3.0
    assert exact_reward("Yes", "yes", incorrect=-1.0) == -1.0
    assert format_reward("<a>1\n2</a> end", pattern=r"<a>.*</a>") == 1.0
    assert format_reward("<a>1</a> end", pattern=r"\A<a>.*</a>\Z", incorrect=-0.5) == -0.5
    with pytest.raises(ValueError, match="pattern"):
        format_reward("x", pattern="(")


@given(st.text(max_size=200), st.text(max_size=20))
def test_any_text_is_scored_without_an_error(response, answer):
    assert math_reward(response, answer) in (0.0, 1.0)


def test_cost_of_hostile_completions_is_linear():
    for text in ("9" * 100_000, "\\boxed{" * 20_000, "1," * 50_000, "\\frac{" * 20_000, "1e999999999", "-" * 100_000):
        assert math_reward(text, "none") == 0.0


def test_rewards_by_name():
    prompts, completions = ["a", "b"], ["1", "2"]
    assert resolve("reward", "math")(prompts, completions, answer=["1", "3"], idx=[0, 1]) == [1.0, 0.0]
    assert resolve("reward", "exact")(prompts, completions, answer=["1", "2"], incorrect=-1.0) == [1.0, 1.0]
    assert resolve("reward", "format")(prompts, completions, pattern="1") == [1.0, 0.0]


@pytest.mark.parametrize("answer", [None, ["1", None], ["1"]])
def test_missing_answers_are_data_errors(answer):
    with pytest.raises(DataError, match="answer"):
        resolve("reward", "math")(["", ""], ["1", "1"], answer=answer)


def test_scale_clamps_then_maps():
    scaled = scale_rewards(
        torch.tensor([-5.0, -1.0, 0.0, 1.0, 7.0]), source_min=-1, source_max=1, target_min=0, target_max=10
    )
    assert scaled.tolist() == [0.0, 0.0, 5.0, 10.0, 10.0]
    with pytest.raises(ValueError, match="source_max"):
        scale_rewards(torch.zeros(1), source_min=1, source_max=1, target_min=0, target_max=1)


def test_overlong_example():
    lengths = torch.tensor([40, 44, 48, 60])
    shaped = shape_overlong(torch.zeros(4), lengths, max_length=48, buffer=8, penalty=0.4)
    torch.testing.assert_close(shaped, torch.tensor([0.0, -0.2, -0.4, -1.0]))
    capped = shape_overlong(torch.ones(4), lengths, max_length=48, buffer=8, penalty=0.4, cap=0.3)
    torch.testing.assert_close(capped, torch.tensor([1.0, 0.8, 0.7, 0.7]))
    with pytest.raises(ValueError, match="buffer"):
        shape_overlong(torch.zeros(4), lengths, max_length=48, buffer=0, penalty=0.4)


def test_stop_properly_shrinks_only_positive_rewards_of_truncated_rows():
    rewards = torch.tensor([1.0, 1.0, -1.0, 0.0])
    truncated = torch.tensor([True, False, True, True])
    assert shape_stop_properly(rewards, truncated, coefficient=0.25).tolist() == [0.25, 1.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="coefficient"):
        shape_stop_properly(rewards, truncated, coefficient=1.5)
    with pytest.raises(TypeError, match="truncated"):
        shape_stop_properly(rewards, truncated.float(), coefficient=0.5)
