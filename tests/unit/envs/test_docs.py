"""The code in docs/writing-an-env.md runs as printed."""

import re
from pathlib import Path

import pytest

from rl_core.envs.answers import answers_of

DOC = Path(__file__).parents[3] / "docs" / "writing-an-env.md"


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)


def test_the_reward_function_of_the_docs_scores(blocks):
    scope = {}
    exec(blocks[0], scope)
    assert scope["score"](["1+1=", "2+2="], ["2", " 5"], answer=["2", "4"]) == [1.0, 0.0]


def test_the_environment_of_the_docs_plays_to_the_end(blocks):
    scope = {}
    exec(blocks[1], scope)
    env = scope["Guess"]({"turns": 2})
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": guess}] for guess in ("5", "7")]
    rows = answers_of(env.step(logs, [{"answer": "7"}, {"answer": "7"}]), 2, what="guess")
    assert [(r.reward, r.terminated, r.observation["content"]) for r in rows] == [
        (0.0, False, "higher\n"),
        (1.0, True, ""),
    ]
    rows = answers_of(env.step(logs[:1], [rows[0].metadata]), 1, what="guess")
    assert rows[0].terminated
