"""`rljob validate` calls nothing of the user's, and yet says which of their functions could not be called."""

import pytest

from rl_core.algorithms.user_functions import check_functions
from rl_core.api.algorithm import AlgorithmSpec

CODE = """
def estimator(inputs, *, reduce, sharpness=2.0): ...
def loss(inputs, clip_high, *, dual_clip): ...
def anything(inputs, **options): ...
def nothing(): ...
def sharp(inputs, *, sharpness): ...
def two(inputs, weights): ...
"""


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)

    def found(**names):
        spec = {"name": names.get("advantage", "grpo"), "loss": {"name": names.get("loss", "ppo_clip")}}
        return list(check_functions(AlgorithmSpec.model_validate(spec), search_path=str(tmp_path)))

    return found


def test_functions_that_can_be_called_are_taken(problems):
    assert problems(advantage="mine:estimator", loss="mine:loss") == []
    assert problems(advantage="mine:anything", loss="mine:anything") == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            {"advantage": "mine:sharp"},
            ["spec.algorithm.name: must be a function of inputs", "reduce, got", "'sharpness'"],
        ),
        (
            {"loss": "mine:two"},
            ["spec.algorithm.loss.name: must be a function of inputs", "dual_clip, got", "'weights'"],
        ),
        ({"loss": "mine:nothing"}, ["spec.algorithm.loss.name", "got 'mine:nothing': too many positional arguments"]),
    ],
)
def test_a_function_that_could_not_be_called_is_named_with_the_parameter_in_the_way(problems, names, told):
    (problem,) = problems(**names)
    assert all(words in problem for words in told)
