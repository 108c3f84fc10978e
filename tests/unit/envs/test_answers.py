"""What an environment may return, and how everything else is refused."""

import sys

import numpy as np
import pytest

from rl_core.api.errors import RolloutDataFailure
from rl_core.api.records import EnvironmentReturn
from rl_core.envs import base
from rl_core.envs.answers import answers_of
from rl_core.messages.envs import EnvAnswer

GOOD = {
    "observations": [{"role": "environment", "content": "go on"}, {"role": "tool", "content": ""}],
    "metadata": [{"turn": 1}, None],
    "next_stop_strings": None,
    "rewards": [0.5, None],
    "terminateds": [False, True],
    "answers": None,
}


def returned(**changes):
    return EnvironmentReturn(**{**GOOD, **changes})


def test_rows_hold_plain_values_in_order():
    assert answers_of(returned(), 2, what="environment e") == [
        EnvAnswer(
            observation={"role": "environment", "content": "go on"},
            metadata={"turn": 1},
            stop_strings=None,
            reward=0.5,
            terminated=False,
            answer=None,
        ),
        EnvAnswer(
            observation={"role": "tool", "content": ""},
            metadata=None,
            stop_strings=None,
            reward=None,
            terminated=True,
            answer=None,
        ),
    ]


def test_arrays_tuples_and_named_rewards_are_taken():
    rows = answers_of(tuple(returned(rewards=np.array([1, 2]), terminateds=np.array([True, False]))), 2, what="e")
    assert [(row.reward, row.terminated) for row in rows] == [(1.0, True), (2.0, False)]
    rows = answers_of(returned(rewards={"style": np.array([1, 2]), "right": [0, None]}), 2, what="e")
    assert [row.reward for row in rows] == [{"style": 1.0, "right": 0.0}, {"style": 2.0, "right": None}]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "step must return an EnvironmentReturn, got NoneType"),
        (returned(next_stop_strings=[None, [""]]), r"row 1: next_stop_strings must be a list of texts .* got \[''\]"),
        (returned(next_stop_strings=[[3], None]), r"row 0: next_stop_strings must be a list of texts .* got \[3\]"),
        (returned(next_stop_strings=["ab", None]), "row 0: next_stop_strings must be a list of texts .* got 'ab'"),
        (returned(rewards=[1.0]), r"rewards must return one score per completion \(2\), got 1"),
        (returned(rewards=[1.0, float("nan")]), "rewards, row 1: a score must be finite, got nan"),
        (returned(rewards={"right": [1.0, float("inf")]}), r"rewards\['right'\], row 1: a score must be finite"),
        (returned(terminateds=[True]), r"terminateds must have one entry per row \(2\), got 1"),
        (returned(terminateds=None), "terminateds must be a list of 2, got NoneType"),
        (returned(terminateds=np.array([[True], [False]])), r"row 0: terminateds must be true or false, got \[True\]"),
        (returned(terminateds=[True, "False"]), "row 1: terminateds must be true or false, got 'False'"),
        (returned(terminateds=[None, True]), "row 0: terminateds must be true or false, got None"),
        (returned(terminateds=[2, True]), "row 0: terminateds must be true or false, got 2"),
        (returned(metadata=[None, "state"]), "row 1: metadata must be a map or None, got 'state'"),
        (returned(rewards={}), "rewards by name must have a name, got none"),
        (returned(observations=["text", "text"]), "row 0: an observation must be {role, content}"),
        (returned(answers=["a", "b", "c"]), r"answers must have one entry per row \(2\), got 3"),
    ],
)
def test_a_wrong_return_is_a_data_failure_naming_environment_field_and_row(result, text):
    with pytest.raises(RolloutDataFailure, match=text) as failure:
        answers_of(result, 2, what="environment e")
    assert str(failure.value).startswith("environment e")


def test_flags_may_be_numbers_or_arrays_of_no_dimension():
    flags = [np.bool_(True), 0]
    assert [row.terminated for row in answers_of(returned(terminateds=flags), 2, what="e")] == [True, False]
    flags = [np.array(False), 1.0]
    assert [row.terminated for row in answers_of(returned(terminateds=flags), 2, what="e")] == [False, True]


def test_arrays_are_numpy_without_torch_and_tensors_with_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    rewards, ends = base.float_array([1.0, 0.0]), base.bool_array([True, False])
    assert (type(rewards), rewards.dtype, ends.dtype) == (np.ndarray, np.float32, np.bool_)

    class FakeTorch:
        """Stands in for the loaded module: importing torch takes seconds, and only the dispatch is of interest."""

        float32, bool = "float32", "bool"

        @staticmethod
        def tensor(values, dtype):
            return (values, dtype)

    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    assert base.float_array([1.0]) == ([1.0], "float32")
    assert base.bool_array([True]) == ([True], "bool")


def test_prompt_and_completion_of_a_log():
    log = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "2"},
    ]
    assert base.prompt_text(log) == "be brief\n1+1="
    assert base.last_assistant_text(log) == "2"
    assert base.last_assistant_text(log[:2]) == ""
