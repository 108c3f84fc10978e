"""The code in docs/writing-an-env.md runs as printed."""

import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from rl_core.api.rewards import total_reward
from rl_core.envs.answers import answers_of
from rl_core.envs.base import EnvironmentInterface, EnvironmentReturn
from rl_core.envs.registry import make_env

DOC = Path(__file__).parents[3] / "docs" / "writing-an-env.md"


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)


def test_the_reward_function_of_the_docs_scores(blocks):
    scope = {}
    exec(blocks[0], scope)
    assert scope["score"](["1+1=", "2+2="], ["2", " 5"], answer=["2", "4"]) == [1.0, 0.0]


def test_the_rewards_in_parts_of_the_docs_are_taken(blocks, monkeypatch):
    module = types.ModuleType("of_the_docs")
    monkeypatch.setitem(sys.modules, "of_the_docs", module)
    exec(blocks[1], vars(module))
    env = make_env("reward", {"reward": "of_the_docs:score"})
    logs = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": text}] for text in ("2", "x" * 200)]
    rows = answers_of(env.step(logs, [{"answer": "2"}] * 2), 2, what="score")
    first, second = [total_reward(row.reward, row.reward_weights or {}) for row in rows]
    assert first == (pytest.approx({"right": 1.0, "short": 0.995}), pytest.approx(1.0995))
    assert second == ({"right": 0.0, "short": 0.0}, 0.0)


def test_the_rewards_by_name_of_the_docs_are_summed_with_its_weights(blocks):
    scope = {"EnvironmentInterface": EnvironmentInterface, "EnvironmentReturn": EnvironmentReturn}
    exec(blocks[3], scope)
    logs = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]]
    env = scope["Scored"]()
    (row,) = answers_of(env.step(logs, [{"answer": "2"}]), 1, what="scored", reward_weights=env.reward_weights)
    assert total_reward(row.reward, row.reward_weights)[1] == pytest.approx(1.0 + 0.1 * 0.995)


def test_the_environment_of_the_docs_plays_to_the_end(blocks):
    scope = {}
    exec(blocks[2], scope)
    env = scope["Guess"]({"turns": 2})
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": guess}] for guess in ("5", "7")]
    rows = answers_of(env.step(logs, [{"answer": "7"}, {"answer": "7"}]), 2, what="guess")
    assert [(r.reward, r.terminated, r.observation["content"]) for r in rows] == [
        (0.0, False, "higher\n"),
        (1.0, True, ""),
    ]
    for guess, told in (("9", "higher\n"), ("100", "lower\n"), ("ten", "higher\n")):
        said = [[*logs[0][:1], {"role": "assistant", "content": guess}]]
        assert answers_of(env.step(said, [{"answer": "10"}]), 1, what="guess")[0].observation["content"] == told
    rows = answers_of(env.step(logs[:1], [rows[0].metadata]), 1, what="guess")
    assert rows[0].terminated


def test_the_functions_of_the_docs_play_a_simulator(blocks, monkeypatch):
    module = types.ModuleType("lake")
    monkeypatch.setitem(sys.modules, "lake", module)
    exec(blocks[4], vars(module))
    (options,) = re.findall(r"type: gymnasium_text\n.*\n  options: (.*)\n", DOC.read_text())
    env, state = make_env("gymnasium_text", yaml.safe_load(options)), {"seed": 0}
    places = []
    for word in ("go", "Right", "down"):
        answer = env.step([[{"role": "assistant", "content": word}]], [state])
        places.append(answer.observations[0]["content"])
        (state,) = answer.metadata
    assert places == [f"You are at row {row}, column {column}. " for row, column in ((0, 0), (0, 1), (1, 1))]
    assert answer.terminateds.tolist() == [True]  # a hole
