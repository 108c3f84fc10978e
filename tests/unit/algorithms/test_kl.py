"""KL(policy || reference): values, direction, clamps and gradients."""

import math

import pytest
import torch

from rl_core.algorithms.kl import kl_loss, kl_penalty

FORMULAS = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "abs": abs,
}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.3), ("k2", 0.045), ("k3", 0.040818), ("abs", 0.3), ("kl", 0.3), ("mse", 0.045), ("low_var_kl", 0.040818)],
)
def test_worked_example(estimator, expected):
    found = kl_penalty(torch.tensor([[-0.7]]), torch.tensor([[-1.0]]), estimator=estimator)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_direction_is_policy_from_reference():
    swapped = kl_penalty(torch.tensor([-1.0]), torch.tensor([-0.7]), estimator="k3")
    assert swapped.item() == pytest.approx(0.049859, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_value_and_gradient_equal_finite_differences(estimator):
    log_probs = torch.tensor([-0.7, -2.0, -0.1], requires_grad=True)
    reference = torch.tensor([-1.0, -0.5, -0.3])
    value = kl_penalty(log_probs, reference, estimator=estimator)
    value.sum().backward()
    formula = FORMULAS[estimator.removesuffix("+")]
    sloped = FORMULAS["k2"] if estimator.endswith("+") else formula
    for i in range(3):
        d = (reference.double()[i] - log_probs.detach().double()[i]).item()
        assert value[i].item() == pytest.approx(formula(d), abs=1e-6)
        slope = (sloped(d - 1e-6) - sloped(d + 1e-6)) / 2e-6
        assert log_probs.grad[i].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_gradient_is_zero_above_either_clamp_and_it_is_counted(estimator):
    log_probs = torch.tensor([[-40.0, -1.0, -6.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -1.2, -1.0]])
    result = kl_loss(log_probs, reference, torch.ones(1, 3, dtype=torch.bool), estimator=estimator)
    result.loss.backward()
    assert log_probs.grad[0, [0, 2]].tolist() == [0.0, 0.0]
    assert log_probs.grad[0, 1].item() != 0.0
    assert float(result.metrics["kl_clamp_fraction"]) == pytest.approx(2 / 3)
    assert float(result.metrics["kl"]) == pytest.approx((10 + FORMULAS[estimator.removesuffix("+")](-0.2) + 10) / 3)


def test_none_lifts_a_clamp():
    far = (torch.tensor([0.0]), torch.tensor([-50.0]))
    assert kl_penalty(*far, estimator="k1").item() == 10.0
    assert kl_penalty(*far, estimator="k1", output_clamp=None).item() == 20.0
    assert kl_penalty(*far, estimator="k1", output_clamp=None, input_clamp=None).item() == 50.0


def test_masked_values_and_weights():
    log_probs = torch.tensor([[-0.7, float("nan")]], requires_grad=True)
    reference = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    result = kl_loss(log_probs, reference, mask, estimator="k1", weights=torch.tensor([[2.0, float("nan")]]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.6)
    assert float(result.metrics["kl"]) == pytest.approx(0.3)
    assert log_probs.grad.tolist() == [[2.0, 0.0]]
    assert reference.grad is None


def test_all_masked_batch_backpropagates():
    log_probs = torch.full((1, 2), float("nan"), requires_grad=True)
    kl_loss(log_probs, log_probs.detach(), torch.zeros(1, 2, dtype=torch.bool)).loss.backward()
    assert log_probs.grad.tolist() == [[0.0, 0.0]]


def test_mistakes_are_named():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="k1, k2, k3, abs"):
        kl_penalty(one, one, estimator="k4")
    with pytest.raises(TypeError, match="ref_log_probs must be float32"):
        kl_penalty(one, one.double())
    with pytest.raises(ValueError, match="input_clamp"):
        kl_penalty(one, one, input_clamp=0.0)
