"""Estimators by name; GDPO and OPD."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_core.algorithms.advantages import (
    AdvantageInputs,
    AdvantageResult,
    compute_advantages,
    gdpo_advantages,
    grpo_advantages,
    opd_advantages,
    whiten,
)
from rl_core.api.errors import ConfigError, DataError

REWARDS = torch.tensor([3.0, 7.0, 8.0, 40.0])
GROUP = torch.zeros(4, dtype=torch.int64)
VALID = torch.tensor([True, True, True, False])
MASK = torch.tensor([[True, True, False]] * 4)
INPUTS = AdvantageInputs(mask=MASK, group_ids=GROUP, valid=VALID, rewards=REWARDS)


def test_names_reach_their_estimator_with_their_options():
    grpo = compute_advantages("grpo", INPUTS, baseline="leave_one_out").advantages
    torch.testing.assert_close(
        grpo, grpo_advantages(REWARDS, GROUP, MASK, valid=VALID, baseline="leave_one_out").advantages
    )
    assert compute_advantages("dr_grpo", INPUTS).advantages[:, 0].tolist() == [-3.0, 1.0, 2.0, 0.0]
    assert compute_advantages("rloo", INPUTS).advantages[:, 0].tolist() == [-4.5, 1.5, 3.0, 0.0]
    assert compute_advantages("raw", INPUTS).advantages[:, 0].tolist() == [3.0, 7.0, 8.0, 0.0]
    assert compute_advantages("reinforce++", INPUTS).advantages[3].tolist() == [0.0, 0.0, 0.0]


def test_baseline_variant_subtracts_the_group_mean_before_whitening():
    rewards = torch.tensor([0.0, 2.0, 10.0, 14.0])
    inputs = AdvantageInputs(mask=MASK, group_ids=torch.tensor([0, 0, 1, 1]), rewards=rewards)
    centred = torch.tensor([-1.0, 1.0, -2.0, 2.0]).unsqueeze(1) * MASK
    found = compute_advantages("reinforce_plus_plus_baseline", inputs).advantages
    torch.testing.assert_close(found, whiten(centred, MASK))


def test_whiten_happens_once_over_valid_tokens():
    result = compute_advantages("dr_grpo", INPUTS, whiten=True)
    plain = compute_advantages("dr_grpo", INPUTS).advantages
    torch.testing.assert_close(result.advantages, whiten(plain, MASK & VALID.unsqueeze(1)))
    assert float(result.metrics["advantages/mean"]) == pytest.approx(0.0, abs=1e-6)
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        with pytest.raises(ValueError, match="already whitens"):
            compute_advantages(name, INPUTS, whiten=True)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "dr_grpo"])
def test_the_clip_comes_before_the_one_whitening_whoever_whitens(name):
    whitens = name == "reinforce_plus_plus"
    rewards = REWARDS.clamp(max=9) if whitens else torch.tensor([-3.0, 1.0, 2.0, 0.0])
    clipped = rewards.clamp(-2.5, 2.5).unsqueeze(1) * (MASK & VALID.unsqueeze(1))
    found = compute_advantages(name, INPUTS, clip=2.5, whiten=not whitens).advantages
    torch.testing.assert_close(found, whiten(clipped, MASK & VALID.unsqueeze(1)))


def test_reduce_reaches_estimators_that_whiten():
    calls = []

    def reduce(value):
        calls.append(value)
        return value

    compute_advantages("reinforce_plus_plus", INPUTS, reduce=reduce)
    assert len(calls) == 2
    compute_advantages("grpo", INPUTS, reduce=reduce)
    assert len(calls) == 2


def test_missing_fields_and_unknown_options_are_named():
    with pytest.raises(ValueError, match="needs group_ids, rewards"):
        compute_advantages("grpo", AdvantageInputs(mask=MASK))
    with pytest.raises(ValueError, match="token_rewards"):
        compute_advantages("gae", INPUTS)
    with pytest.raises(ValueError, match=r"grpo.*baseline, eps, scale.*got sharpness"):
        compute_advantages("grpo", INPUTS, sharpness=2)
    with pytest.raises(ValueError, match="got scale"):
        compute_advantages("dr_grpo", INPUTS, scale="group_std")
    with pytest.raises(ValueError, match="got 'grop'"):
        compute_advantages("grop", INPUTS)


def test_all_shared_metrics_are_there():
    metrics = compute_advantages("reinforce_plus_plus", INPUTS).metrics
    wanted = {"rewards/std", "advantages/max", "returns/min", "groups/total", "groups/zero_std", "rows/invalid"}
    assert wanted <= set(metrics)


@pytest.mark.parametrize("name", ["opd", "gae"])
def test_invalid_rows_train_nothing_and_enter_no_metric_whatever_the_estimator(name):
    per_token = torch.tensor([[1.0, 1.0, 0.0]] * 3 + [[100.0, 100.0, 0.0]])
    inputs = AdvantageInputs(
        mask=MASK, valid=VALID, token_rewards=per_token, teacher_log_probs=per_token, log_probs=torch.zeros(4, 3)
    )
    result = compute_advantages(name, inputs)
    assert result.advantages[3].tolist() == [0.0, 0.0, 0.0]
    assert result.advantages[0].abs().sum() > 0
    extremes = {key: float(stat) for key, stat in result.metrics.items() if key.endswith("/max")}
    assert max(extremes.values()) <= 2.0
    nothing_valid = replace(inputs, valid=torch.zeros(4, dtype=torch.bool))
    assert not {"advantages/max", "returns/max"} & set(compute_advantages(name, nothing_valid).metrics)


@pytest.fixture
def own(monkeypatch):
    """Return a function that names a user's estimator which gives back what a function makes of the inputs."""

    def named(function):
        monkeypatch.setitem(sys.modules, "own_estimators", SimpleNamespace(mine=function))
        return "own_estimators:mine"

    return named


def test_what_a_users_estimator_leaves_under_the_mask_trains_nothing(own):
    name = own(lambda inputs: AdvantageResult(torch.where(inputs.mask, 2.0, float("nan")).requires_grad_()))
    result = compute_advantages(name, INPUTS)
    assert torch.equal(result.advantages, 2.0 * (MASK & VALID[:, None])) and not result.advantages.requires_grad


def test_an_advantage_that_is_not_finite_is_a_data_error_where_it_would_train(own):
    def divided(inputs):
        rewards = inputs.rewards - inputs.rewards[inputs.valid].mean()
        return AdvantageResult((rewards / inputs.rewards[inputs.valid].std())[:, None] * inputs.mask)

    name = own(divided)
    assert compute_advantages(name, INPUTS).advantages.isfinite().all()
    with pytest.raises(DataError, match=r"'own_estimators:mine' must be finite where it trains, got nan in row 0"):
        compute_advantages(name, replace(INPUTS, rewards=torch.ones(4)))


def test_a_rank_without_rows_calls_only_an_estimator_that_reduces_over_ranks(own):
    nothing = AdvantageInputs(mask=MASK[:0], group_ids=GROUP[:0], valid=VALID[:0], rewards=REWARDS[:0])
    best = own(lambda inputs: AdvantageResult(inputs.rewards.amax() * inputs.mask))  # the largest of none is an error
    result = compute_advantages(best, nothing, whiten=True)
    assert result.advantages.shape == (0, 3) and float(result.metrics["rows/total"]) == 0

    def centred(inputs, *, reduce):
        total, rows = reduce(torch.tensor([inputs.rewards.sum(), len(inputs.rewards)]))
        return AdvantageResult((inputs.rewards - total / rows)[:, None] * inputs.mask)

    calls = []
    compute_advantages(own(centred), nothing, reduce=lambda value: calls.append(1) or value)
    assert calls == [1]
    alone = compute_advantages(own(centred), replace(INPUTS, valid=None))
    assert alone.advantages[:, 0].tolist() == [-11.5, -7.5, -6.5, 25.5]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda inputs: inputs.mask.float(), "must return an AdvantageResult, got Tensor"),
        (lambda inputs: AdvantageResult(inputs.mask.double()), r"float32 .* got torch\.float64"),
        (lambda inputs: AdvantageResult(inputs.rewards), r"shape of the mask \(4, 3\), got torch\.float32 \(4,\)"),
        (lambda inputs: AdvantageResult(torch.ones(4, 5)), r"shape of the mask \(4, 3\), got torch\.float32 \(4, 5\)"),
    ],
    ids=["type", "dtype", "rows", "width"],
)
def test_what_is_no_advantage_per_token_is_refused_by_name(own, wrong, told):
    with pytest.raises(ConfigError, match=f"advantage 'own_estimators:mine' .*{told}"):
        compute_advantages(own(wrong), INPUTS)


def test_gae_by_name_runs_with_and_without_a_critic():
    inputs = AdvantageInputs(mask=MASK, token_rewards=torch.ones(4, 3))
    assert compute_advantages("gae", inputs).returns[0].tolist() == [2.0, 1.0, 0.0]
    with_values = AdvantageInputs(mask=MASK, token_rewards=torch.ones(4, 3), values=torch.ones(4, 3))
    assert compute_advantages("ppo", with_values, gamma=0.5).returns[0].tolist() == [1.5, 1.0, 0.0]


def test_embodied_gae_by_name_whitens_over_the_embodied_mask():
    rewards, dones = torch.rand(2, 3, 2), torch.zeros(2, 4, 2, dtype=torch.bool)
    mask = torch.ones(2, 3, 2, dtype=torch.bool)
    inputs = AdvantageInputs(mask=mask, rewards=rewards, values=torch.zeros(2, 7), dones=dones)
    result = compute_advantages("embodied_gae", inputs, whiten=True, level="action")
    assert result.advantages.shape == (2, 6)
    assert result.advantages.mean().item() == pytest.approx(0.0, abs=1e-6)


def test_gdpo_compares_each_component_by_itself():
    parts = {"accuracy": torch.tensor([0.0, 1.0, 1.0, 0.0]), "format": torch.tensor([0.0, 0.0, 100.0, 0.0])}
    found = gdpo_advantages(parts, GROUP, MASK, weights={"accuracy": 2.0, "format": 1.0}, valid=VALID)
    columns = torch.ones(4, 1, dtype=torch.bool)
    row = sum(
        weight * grpo_advantages(parts[name], GROUP, columns, valid=VALID).advantages
        for name, weight in (("accuracy", 2.0), ("format", 1.0))
    )
    expected = whiten(row, VALID.unsqueeze(1)) * MASK
    torch.testing.assert_close(found.advantages, expected)
    inputs = AdvantageInputs(mask=MASK, group_ids=GROUP, valid=VALID, reward_components=parts)
    by_name = compute_advantages("gdpo", inputs, weights={"accuracy": 2.0, "format": 1.0})
    torch.testing.assert_close(by_name.advantages, expected)
    assert {"groups/degenerate", "groups/zero_std/format", "rewards/mean/format"} <= set(by_name.metrics)
    with_totals = compute_advantages("gdpo", replace(inputs, rewards=REWARDS)).metrics
    assert float(with_totals["rewards/mean"]) == 6.0
    assert {"groups/zero_std", "groups/degenerate", "rewards/mean/format"} <= set(with_totals)


def test_gdpo_mistakes_are_named():
    one = {"accuracy": REWARDS}
    with pytest.raises(ValueError, match=r"at least two rewards by name, got \['accuracy'\]"):
        gdpo_advantages(one, GROUP, MASK)
    with pytest.raises(ValueError, match="weights"):
        gdpo_advantages(one | {"format": REWARDS}, GROUP, MASK, weights={"accuracy": 1.0})


def test_opd_is_the_teachers_log_probability_minus_the_students():
    teacher, student = torch.tensor([[-1.0, float("nan")]]), torch.tensor([[-3.0, 0.0]], requires_grad=True)
    result = opd_advantages(teacher, student, torch.tensor([[True, False]]))
    assert result.advantages.tolist() == [[2.0, 0.0]]
    assert not result.advantages.requires_grad
