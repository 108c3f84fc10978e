"""`math`: what counts as right, wrong, and as a failure of the data."""

import asyncio
import threading
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.envs.cpu_time import CpuLimitReached, cpu_limit
from rl_core.envs.math import MathEnvironment, compare_numeric, final_answer


def log(completion):
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": completion}]


def score(env, completion, truth):
    return env.step([log(completion)], [{"ground_truth": truth}])


@pytest.fixture(scope="module")
def symbolic():
    return MathEnvironment({})


@pytest.mark.parametrize(
    ("completion", "truth", "right"),
    [
        ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", True),
        ("12+34=46", "46", True),
        ("46", 46, True),
        ("$\\frac{2}{4}$", "1/2", True),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("47", "46", False),
        ("no idea", "46", False),
        ("", "46", False),
    ],
)
def test_math_verify_compares_by_meaning(symbolic, completion, truth, right):
    assert float(score(symbolic, completion, truth).rewards[0]) == float(right)


def test_answers_hold_the_text_taken_for_the_answer(symbolic):
    assert score(symbolic, "it is \\boxed{46}", "46").answers == ["46"]
    assert score(symbolic, "no idea", "46").answers == [None]


def test_the_last_assistant_message_is_scored_and_the_episode_ends(symbolic):
    messages = [*log("41"), {"role": "user", "content": "again"}, {"role": "assistant", "content": "46"}]
    returned = symbolic.step([messages], [{"ground_truth": "46"}])
    assert float(returned.rewards[0]) == 1.0
    assert bool(returned.terminateds[0])
    assert returned.metadata == [{"ground_truth": "46"}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("it costs $1,234,567.", 1234567),
        ("\\boxed{-1,000}", -1000),
        ("x = \u22125", -5),
        ("12,345.50", 12345.5),
        ("2, 3", 3),
        ("1,23", 23),
        (".5", 0.5),
        ("5.", 5),
        ("3/4", 0.75),
        ("1e3", 1000),
    ],
)
def test_numeric_reads_the_last_number_with_its_thousands_commas(text, value):
    env = MathEnvironment({"comparator": "numeric"})
    assert float(score(env, text, value).rewards[0]) == 1.0
    assert float(score(env, str(value), text).rewards[0]) == 1.0


@pytest.mark.parametrize("comparator", ["math_verify", "numeric", "exact"])
@pytest.mark.parametrize("truth", [None, "", "  "])
def test_a_missing_ground_truth_never_makes_silence_right(comparator, truth):
    with pytest.raises(RolloutDataFailure, match="ground_truth"):
        score(MathEnvironment({"comparator": comparator}), "", truth)


@pytest.mark.parametrize("comparator", ["math_verify", "numeric"])
@pytest.mark.parametrize("truth", [None, "", "?", ["46"], True])
def test_unreadable_ground_truth_is_a_data_failure_and_never_a_zero(comparator, truth):
    with pytest.raises(RolloutDataFailure, match="row 0.*ground_truth"):
        score(MathEnvironment({"comparator": comparator}), "46", truth)


def test_a_missing_ground_truth_is_a_data_failure(symbolic):
    with pytest.raises(RolloutDataFailure, match=r"data\.answerKey"):
        symbolic.step([log("46")], [None])


def test_a_crash_of_the_verifier_is_a_data_failure(symbolic, monkeypatch):
    def crash(*args, **kwargs):
        raise TypeError("cannot compare")

    comparator = symbolic._compare
    monkeypatch.setattr(comparator, "_verify", crash)
    with pytest.raises(RolloutDataFailure, match="TypeError: cannot compare"):
        score(symbolic, "46", "46")


def test_an_answer_too_costly_to_read_is_wrong():
    env = MathEnvironment({"cpuSeconds": 0.3})
    assert float(score(env, "\\boxed{100000!}", "3").rewards[0]) == 0.0


def test_the_cpu_limit_does_not_count_waiting():
    with cpu_limit(0.05):
        threading.Event().wait(0.2)
    with pytest.raises(CpuLimitReached), cpu_limit(0.05):
        while True:
            pass


async def test_the_environment_works_in_a_thread_where_signals_do_not(symbolic):
    returned = await asyncio.to_thread(score, symbolic, "46", "46")
    assert float(returned.rewards[0]) == 1.0


def test_rewards_are_the_configured_pair():
    env = MathEnvironment({"comparator": "exact", "correct": 2.0, "incorrect": -1.0})
    returned = env.step([log("46"), log("47")], [{"ground_truth": "46"}] * 2)
    assert [float(reward) for reward in returned.rewards] == [2.0, -1.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a \\boxed{x} b \\boxed{\\frac{1}{2}} c", "\\frac{1}{2}"),
        ("work #### 12", "12"),
        (" 46 ", "46"),
        ("\\boxed{unbalanced", "\\boxed{unbalanced"),
    ],
)
def test_final_answer_is_the_last_box_else_after_the_mark_else_all(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("completion", "truth", "right"),
    [
        ("the sum is 1,234.50", "1234.5", True),
        ("1/3", "0.333333333", True),
        ("-7", "7", False),
        ("3.", "3", True),
        (".5", "0.5", True),
        ("1e3", "1000", True),
        ("1e999999999999", "3", False),
        ("1/0", "3", False),
        ("words", "3", False),
    ],
)
def test_numeric_reads_the_last_number(completion, truth, right):
    assert compare_numeric(completion, truth)[0] is right


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9), st.booleans())
def test_numeric_accepts_any_spelling_of_the_same_number(number, thousands):
    spelled = f"{number:,f}" if thousands else f"{number:f}"
    assert compare_numeric(f"answer: {spelled}", str(number))[0]
    assert not compare_numeric(f"answer: {number + Decimal(max(1, abs(number)))}", str(number))[0]


@given(st.text(max_size=60))
def test_numeric_gives_a_verdict_for_any_text(text):
    assert compare_numeric(text, "46")[0] in (True, False)


def test_unknown_options_are_errors_naming_the_known_ones():
    with pytest.raises(ConfigError, match=r"env\.options\.comparater: unknown field.*comparator, correct"):
        MathEnvironment({"comparater": "exact"})


def test_metrics_leave_out_masked_samples():
    batch = {
        "rewards": [1.0, 0.0, 1.0, 0.0, 1.0],
        "is_end": [True, True, True, False, True],
        "sample_mask": [1, 1, 1, 1, 0],
        "generation_lengths": [2, 4, 6, 8, 100],
        "prompt_lengths": [5, 5, 7, 7, 100],
        "text": ["a", "a", "b", "c", "c"],
    }
    same, metrics = MathEnvironment({"comparator": "exact"}).global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics == {
        "accuracy": 0.5,
        "pass@k": pytest.approx(2 / 3),
        "fraction_of_samples_properly_ended": 0.75,
        "num_problems_in_batch": 4.0,
        "generation_lengths": 5.0,
        "prompt_lengths": 6.0,
    }
