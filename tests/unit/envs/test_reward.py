"""`reward`: how a user function is called, and that nothing it does wrong becomes a score."""

import inspect
import math
import sys
import types

import pytest

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.envs.reward import RewardEnvironment


class Unruly:
    """Neither a number nor anything that can be told."""

    def __float__(self):
        raise RuntimeError

    __repr__ = __float__


def log(prompt, completion):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


@pytest.fixture
def user(monkeypatch):
    """A module of the user's; tests put functions into it."""
    module = types.ModuleType("user_rewards")
    monkeypatch.setitem(sys.modules, "user_rewards", module)
    return module


def env(user, function):
    user.score = function
    return RewardEnvironment({"reward": "user_rewards:score"})


async def step(environment, logs, metadata):
    returned = environment.step(logs, metadata)
    return await returned if inspect.isawaitable(returned) else returned


LOGS = [log("1+1=", "2"), log("2+2=", "5")]
COLUMNS = [{"answer": "2", "level": 1}, {"answer": "4"}]


async def test_prompts_completions_and_columns_arrive_as_lists_with_none_for_missing(user):
    seen = {}

    def score(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, 0.0]

    returned = await step(env(user, score), LOGS, COLUMNS)
    assert [float(r) for r in returned.rewards] == [1.0, 0.0]
    assert seen == {
        "prompts": ["1+1=", "2+2="],
        "completions": ["2", "5"],
        "answer": ["2", "4"],
        "level": [1, None],
        "messages": LOGS,
    }


async def test_a_function_without_keywords_gets_only_what_it_names(user):
    returned = await step(env(user, lambda p, c, answer: [float(a == b) for a, b in zip(c, answer)]), LOGS, COLUMNS)
    assert [float(r) for r in returned.rewards] == [1.0, 0.0]
    assert all(returned.terminateds)


async def test_a_required_column_the_data_lacks_is_named(user):
    with pytest.raises(RolloutDataFailure, match="needs the column 'solution', got columns"):
        await step(env(user, lambda p, c, solution: [1, 1]), LOGS, COLUMNS)


async def test_arguments_of_the_options_come_along_as_they_are(user):
    built_in = RewardEnvironment({"reward": "format", "arguments": {"pattern": "[0-4]", "correct": 2.0}})
    assert [float(r) for r in (await step(built_in, LOGS, COLUMNS)).rewards] == [2.0, 0.0]
    user.score = lambda p, c, level, least=0: [float((one or 0) >= least) for one in level]
    named = RewardEnvironment({"reward": "user_rewards:score", "arguments": {"least": 1}})
    assert [float(r) for r in (await step(named, LOGS, COLUMNS)).rewards] == [1.0, 0.0]


async def test_an_argument_that_is_missing_or_not_taken_is_named(user):
    with pytest.raises(RolloutDataFailure, match="needs the column 'pattern', .* set it in env.options.arguments"):
        await step(RewardEnvironment({"reward": "format"}), LOGS, COLUMNS)
    user.score = lambda p, c, answer: [1, 1]
    with pytest.raises(ConfigError, match="env.options.arguments: .* user_rewards:score .*, got least; it has answer"):
        RewardEnvironment({"reward": "user_rewards:score", "arguments": {"least": 1}})


@pytest.mark.parametrize(
    ("function", "way_out"),
    [
        (lambda completions, answer: [], "add prompts"),
        (lambda completions: [], r"\(completions\); add prompts"),
        (lambda completions, **kw: [], r"\(completions, \*\*kw\); add prompts"),
        (lambda text, prompts: [], "add completions"),
        (lambda completions, prompts: [], "reorder its parameters"),
    ],
    ids=["no prompts", "one", "keywords", "no completions", "order"],
)
def test_a_function_that_would_take_prompts_for_completions_is_refused(user, function, way_out):
    rule = r"must take \(prompts, completions, ...\) in this order, got user_rewards:score.*"
    with pytest.raises(ConfigError, match=rule + way_out):
        env(user, function)


async def test_a_function_that_takes_a_column_by_position_is_refused(user):
    """Rewards written for verl are; they would score the prompt as if it were the answer."""
    with pytest.raises(
        RolloutDataFailure, match=r"score\(text, level\), and level is a column .* begin its parameters"
    ):
        await step(env(user, lambda text, level: [1.0, 1.0]), LOGS, COLUMNS)


async def test_a_call_with_too_many_arguments_is_told_without_a_line_of_ours(user):
    with pytest.raises(RolloutDataFailure, match=r"it raised TypeError: .*2 were given; correct it"):
        await step(env(user, lambda: [1.0, 1.0]), LOGS, COLUMNS)


async def test_a_function_that_reads_completions_as_lists_of_messages_is_told_their_form(user):
    """The usual first line of rewards for chat data in TRL."""
    with pytest.raises(RolloutDataFailure, match=r"string indices .*; write completion for completion\[0\]"):
        await step(env(user, lambda p, completions, **kw: [c[0]["content"] for c in completions]), LOGS, COLUMNS)


async def test_asynchronous_functions_are_awaited(user):
    async def score(prompts, completions, **columns):
        return [1, 2]

    assert [float(r) for r in (await step(env(user, score), LOGS, COLUMNS)).rewards] == [1.0, 2.0]


async def test_none_means_not_applicable_and_stays_none(user):
    assert (await step(env(user, lambda p, c, **k: [None, 1.0]), LOGS, COLUMNS)).rewards == [None, 1.0]


async def test_a_reward_may_have_parts_and_rows_without_them_have_none(user):
    result = [
        {"reward": 1.5, "parts": {"right": 1.0, "short": 0.5}},
        types.SimpleNamespace(reward=0, parts={"right": 0}),
    ]
    rewards = (await step(env(user, lambda p, c, **k: result), LOGS, COLUMNS)).rewards
    assert {name: list(values) for name, values in rewards.items()} == {
        "reward": [1.5, 0.0],
        "right": [1.0, 0.0],
        "short": [0.5, None],
    }
    rewards = (await step(env(user, lambda p, c, **k: [None, result[0]]), LOGS, COLUMNS)).rewards
    assert (list(rewards["reward"]), list(rewards["right"])) == ([None, 1.5], [None, 1.0])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([{"right": 1.0}, 1.0], "row 0: a reward must be a number, None, or a mapping"),
        ([1.0, {"reward": "1"}], "row 1: the reward must be a finite number or None, got '1'"),
        ([1.0], r"one score per completion \(2\), got 1"),
        ([1.0, math.nan], "row 1: a score must be finite, got nan"),
        ([1.0, math.inf], "row 1: a score must be finite, got inf"),
        ([1.0, "good"], "row 1: a score must be a number or None, got 'good'"),
        ([1.0, "1"], "row 1: a score must be a number or None, got '1'"),
        ([1.0, b"1"], "row 1: a score must be a number or None, got b'1'"),
        ([10**400, 1.0], "row 0: a score must be a number or None, got 1000"),
        ([1e300, 1.0], r"row 0: a score must be finite, got 1e\+300"),
        ([Unruly(), 1.0], "row 0: a score must be a number or None, got <Unruly instance"),
        (None, "must return a list of 2 scores, got NoneType"),
        (1.0, "must return a list of 2 scores, got float"),
    ],
    ids=[
        "without-reward",
        "reward-as-text",
        "length",
        "nan",
        "inf",
        "text",
        "number-as-text",
        "number-as-bytes",
        "huge-integer",
        "beyond-float32",
        "unruly",
        "none",
        "number",
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_wrong_result_is_a_data_failure_naming_function_row_and_value(user, result, text, asynchronous):
    async def later(prompts, completions, **columns):
        return result

    function = later if asynchronous else lambda p, c, **k: result
    with pytest.raises(RolloutDataFailure, match=text) as failure:
        await step(env(user, function), LOGS, COLUMNS)
    assert "user_rewards:score" in str(failure.value)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_is_a_data_failure_naming_its_line(user, asynchronous):
    async def later(prompts, completions, **columns):
        raise KeyError("answr")

    def now(prompts, completions, **columns):
        raise KeyError("answr")

    with pytest.raises(
        RolloutDataFailure, match=r"user_rewards:score.*KeyError: 'answr' \(test_reward\.py:\d+ in"
    ) as failure:
        await step(env(user, later if asynchronous else now), LOGS, COLUMNS)
    assert isinstance(failure.value.__cause__, KeyError)


async def test_registered_rewards_are_known_by_name():
    returned = await step(RewardEnvironment({"reward": "exact"}), LOGS, COLUMNS)
    assert [float(r) for r in returned.rewards] == [1.0, 0.0]


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="exact.*got 'exakt'"):
        RewardEnvironment({"reward": "exakt"})


async def test_an_explanation_is_added_to_the_metadata_of_its_row(user):
    rewards = [{"reward": 1.5, "explanation": "because"}, 0.5]
    returned = await step(env(user, lambda p, c: rewards), LOGS, COLUMNS)
    assert [float(r) for r in returned.rewards["reward"]] == [1.5, 0.5]
    assert (
        returned.metadata == [COLUMNS[0] | {"explanation": "because"}, COLUMNS[1]] and "explanation" not in COLUMNS[0]
    )
    with pytest.raises(RolloutDataFailure, match=r"row 0: the explanation of a reward must be text or None, got 7"):
        await step(env(user, lambda p, c: [{"reward": 1.0, "explanation": 7}, 0.0]), LOGS, COLUMNS)


async def test_a_long_explanation_loses_its_middle(user):
    texts = ["begin" + "x" * 10_000 + "end", "short"]
    returned = await step(env(user, lambda p, c: [{"reward": 1, "explanation": text} for text in texts]), LOGS, COLUMNS)
    long, short = (row["explanation"] for row in returned.metadata)
    assert (
        long.startswith("begin") and long.endswith("xend") and "6008 characters left out" in long and len(long) < 4100
    )
    assert short == "short"


@pytest.mark.parametrize(
    ("function", "error", "way_out"),
    [
        (lambda p, c, completion_ids: [1, 1], RolloutDataFailure, "'completion_ids' .*; completions are texts"),
        (lambda p, c, trainer_state: [1, 1], RolloutDataFailure, "'trainer_state' .*; the trainer is not passed"),
        (lambda p, c, *, completions: [1, 1], RolloutDataFailure, "are the first two parameters, passed by position"),
        (lambda p, c, extra_info: [1, 1], RolloutDataFailure, "'extra_info' .* a call scores a list of completions"),
        (lambda data_source, solution_str, ground_truth: 1, ConfigError, "in the form of verl; write"),
    ],
    ids=["ids", "trainer", "keyword", "verl column", "verl"],
)
async def test_parameters_of_other_libraries_are_told_what_is_passed_here(user, function, error, way_out):
    with pytest.raises(error, match=way_out):
        await step(env(user, function), LOGS, COLUMNS)
