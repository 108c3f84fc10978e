"""`rljob validate` calls the user's estimators and losses once on example rows, and training turns their exceptions into bad input."""

import pytest
import torch

from rl_core.algorithms.advantages.compute import compute_advantages
from rl_core.algorithms.advantages.types import AdvantageInputs
from rl_core.algorithms.user_functions import check_functions
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import ConfigError

CODE = """
import time
import torch
from rl_core.algorithms import AdvantageResult, LossResult, aggregate
from rl_core.algorithms.stats import mean_stat

def estimator(inputs, *, reduce, sharpness=2.0):
    components = inputs.reward_components["style"]
    return AdvantageResult((inputs.rewards + components)[:, None] * inputs.mask)
def loss(inputs, clip_high, *, dual_clip):
    values = -inputs.advantages * (inputs.log_probs - inputs.old_log_probs).exp()
    metrics = {"mine": mean_stat(values, inputs.mask)}
    return LossResult(aggregate(values, inputs.mask, mode=inputs.aggregation), metrics)
def nothing(): ...
def sharp(inputs, *, sharpness): ...
def two(inputs, weights): ...
def typo(inputs):
    return AdvantageResult(inputs.reward[:, None] * inputs.mask)
def tensor_metric(inputs):
    return AdvantageResult(torch.zeros_like(inputs.mask, dtype=torch.float32), metrics={"x": torch.ones(1)})
def no_deviation(inputs):
    same = inputs.group_ids[:, None] == inputs.group_ids
    deviation = torch.stack([inputs.rewards[row].std() for row in same])
    return AdvantageResult((inputs.rewards / deviation)[:, None] * inputs.mask)
def library(inputs):
    return AdvantageResult(torch.stack([]))
def detached(inputs):
    return LossResult(aggregate(inputs.log_probs.detach(), inputs.mask))
def sleeps(inputs):
    time.sleep(600)
"""


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)

    def found(*, seconds=120.0, **names):
        spec = {"name": names.get("advantage", "grpo"), "loss": {"name": names.get("loss", "ppo_clip")}}
        return list(check_functions(AlgorithmSpec.model_validate(spec), search_path=str(tmp_path), seconds=seconds))

    return found


def test_functions_that_work_are_taken(problems):
    assert problems(advantage="mine:estimator", loss="mine:loss") == []


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
        ({"advantage": "mine:typo"}, ["has no attribute 'reward'", "(mine.py:18 in typo)"]),
        ({"advantage": "mine:tensor_metric"}, ["'mine:tensor_metric' must return Stats", "got Tensor for 'x'"]),
        ({"advantage": "mine:no_deviation"}, ["must be finite where it trains", "groups may have equal rewards"]),
        ({"advantage": "mine:library"}, ["RuntimeError", "(mine.py:26 in library)"]),
        ({"loss": "mine:detached"}, ["made of inputs.log_probs"]),
    ],
)
def test_a_function_that_does_not_work_is_named_with_the_rule_and_its_line(problems, names, told):
    (problem,) = problems(**names)
    assert all(words in problem for words in told), problem


def test_a_function_that_does_not_return_is_ended(problems):
    (problem,) = problems(advantage="mine:sleeps", seconds=0.1)
    assert "must be imported and called within 0.1 s" in problem


def test_in_training_an_exception_of_the_user_is_bad_input_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "later_typo.py").write_text("def estimate(inputs):\n    return inputs.reward\n")
    monkeypatch.syspath_prepend(tmp_path)
    inputs = AdvantageInputs(mask=torch.ones(2, 3, dtype=torch.bool), rewards=torch.ones(2))
    with pytest.raises(
        ConfigError, match=r"'later_typo:estimate' must not fail, it raised .*\(later_typo.py:2 in estimate\)"
    ):
        compute_advantages("later_typo:estimate", inputs)


def test_memory_that_runs_out_in_the_users_code_stays_a_failure_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "large.py").write_text("def estimate(inputs):\n    raise MemoryError\n")
    monkeypatch.syspath_prepend(tmp_path)
    inputs = AdvantageInputs(mask=torch.ones(2, 3, dtype=torch.bool), rewards=torch.ones(2))
    with pytest.raises(MemoryError):
        compute_advantages("large:estimate", inputs)
