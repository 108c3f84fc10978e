"""Critic, supervised, entropy, their sum, and importance weights."""

import math

import pytest
import torch

from rl_core.algorithms.losses import (
    LossResult,
    combine_losses,
    critic_loss,
    entropy_term,
    explained_variance,
    importance_weights,
)

TWO = torch.ones(1, 2, dtype=torch.bool)
THREE = torch.ones(1, 3, dtype=torch.bool)
TRAIN = torch.tensor([[-1.0, -0.2, -2.0]])
ROLLOUT = torch.tensor([[-1.3, -1.1, -0.5]])


def test_critic_example():
    result = critic_loss(
        torch.tensor([[2.0, -0.4]]),
        torch.tensor([[2.6, 1.0]]),
        TWO,
        old_values=torch.tensor([[1.5, 0.0]]),
        value_clip=0.3,
        huber_delta=1.0,
    )
    assert result.loss.item() == pytest.approx(0.61)
    assert float(result.metrics["value_clip_ratio"]) == 1.0
    assert float(result.metrics["values"]) == pytest.approx(0.8)


def test_critic_gradient_equals_finite_differences_of_the_formula():
    values = torch.tensor([[0.3, -2.0, 4.0, 0.9]], requires_grad=True)
    returns, old = torch.tensor([[1.0, 1.0, -9.0, 1.0]]), torch.tensor([[0.0, -1.9, 1.0, 5.0]])
    mask = torch.tensor([[True, True, True, False]])
    critic_loss(values, returns, mask, old_values=old, value_clip=0.5, huber_delta=2.0).loss.backward()

    def huber(error):
        return error**2 / 2 if abs(error) <= 2 else 2 * (abs(error) - 1)

    def loss(v, target, before):
        moved = before + min(max(v - before, -0.5), 0.5)
        return max(huber(target - v), huber(target - moved)) / 3

    for t in range(3):
        v, target, before = (x[0, t].item() for x in (values.detach().double(), returns.double(), old.double()))
        slope = (loss(v + 1e-6, target, before) - loss(v - 1e-6, target, before)) / 2e-6
        assert values.grad[0, t].item() == pytest.approx(slope, abs=1e-5)
    assert values.grad[0, 3].item() == 0.0


def test_critic_ignores_nan_under_the_mask_and_backpropagates_nothing():
    values = torch.full((1, 2), float("nan"), requires_grad=True)
    nothing = critic_loss(values, values.detach(), torch.zeros_like(TWO), old_values=values.detach(), value_clip=1.0)
    nothing.loss.backward()
    assert nothing.loss.item() == 0.0 and values.grad.tolist() == [[0.0, 0.0]]


def test_square_loss_without_huber():
    loss = critic_loss(torch.tensor([[0.0]]), torch.tensor([[30.0]]), TWO[:, :1], huber_delta=None).loss
    assert loss.item() == 450.0
    with pytest.raises(ValueError, match="old_values"):
        critic_loss(torch.zeros(1, 2), torch.zeros(1, 2), TWO, value_clip=0.2)
    with pytest.raises(TypeError, match="returns must be float32"):
        critic_loss(torch.zeros(1, 2), torch.zeros(1, 2).double(), TWO)


def test_explained_variance_over_ranks():
    returns = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(2, 2), returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(2, 2), mask) == 0.0
    values = torch.tensor([[1.0, 2.5], [2.0, 4.0]])
    expected = 1 - (returns - values).double().var(correction=0) / returns.double().var(correction=0)
    assert explained_variance(values, returns, mask) == pytest.approx(expected.item())
    # Two ranks that hold the same rows: doubling the sums is their reduction.
    assert explained_variance(values, returns, mask, reduce=lambda x: x * 2) == pytest.approx(expected.item())


def test_entropy_is_averaged_over_the_tokens_that_train():
    term = entropy_term(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]))
    assert term.loss.item() == 1.0 and float(term.metrics["entropy"]) == 1.0


def test_combined_loss_is_the_signed_sum():
    def term(value):
        return LossResult(torch.tensor(value), {})

    result = combine_losses(
        term(1.0),
        kl=term(2.0),
        kl_coefficient=0.5,
        entropy=term(3.0),
        entropy_coefficient=0.1,
        value=term(4.0),
        value_coefficient=0.25,
    )
    assert result.loss.item() == pytest.approx(1 + 1 - 0.3 + 1)
    assert float(result.metrics["loss"]) == pytest.approx(2.7)
    assert combine_losses(term(1.0)).loss.item() == 1.0
    assert combine_losses(term(1.0), entropy=term(float("nan"))).loss.item() == 1.0


@pytest.mark.parametrize("name", ["kl", "entropy", "value"])
def test_coefficient_without_its_term_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}_coefficient"):
        combine_losses(LossResult(torch.tensor(0.0), {}), **{f"{name}_coefficient": 0.3})


def test_importance_examples():
    tis, metrics = importance_weights(TRAIN, ROLLOUT, THREE)
    torch.testing.assert_close(tis, torch.tensor([[1.349859, 2.0, 0.223130]]), atol=1e-6, rtol=0)
    assert float(metrics["is_oob_fraction"]) == pytest.approx(1 / 3)
    assert float(metrics["is_weight_max"]) == 2.0
    assert float(metrics["logprob_abs_diff"]) == pytest.approx((0.3 + 0.9 + 1.5) / 3)
    assert float(metrics["logprob_error_multiplier"]) == pytest.approx(sum(map(math.exp, (0.3, 0.9, 1.5))) / 3)
    icepop, _ = importance_weights(TRAIN, ROLLOUT, THREE, mode="icepop", low=0.5, high=2.0)
    torch.testing.assert_close(icepop, torch.tensor([[1.349859, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_sequence_weights_are_the_rows_product():
    weights, _ = importance_weights(TRAIN, ROLLOUT, torch.tensor([[True, True, False]]), level="sequence", high=99.0)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(1.2), math.exp(1.2), 0.0]]))


def test_sequence_mask_drops_whole_rows_by_their_geometric_mean():
    rollout = torch.zeros(3, 2)
    train = torch.tensor([[0.5, -0.5], [0.01, 0.01], [0.0, 0.002]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    weights, metrics = importance_weights(train, rollout, mask, mode="seq-mask")
    expected = train.exp() * torch.tensor([[1.0], [0.0], [1.0]])
    torch.testing.assert_close(weights, expected)
    assert float(metrics["is_rows_dropped"]) == 1.0
    assert float(metrics["is_oob_fraction"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", ["tis", "icepop", "seq-mask"])
def test_weights_that_are_not_finite_and_masked_ones_are_zero(mode):
    rollout = torch.tensor([[float("-inf"), 0.0, float("nan"), float("nan")]])
    train = torch.tensor([[0.0, 0.0, 0.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    weights, _ = importance_weights(train, rollout, mask, mode=mode, low=0.5, high=3.0)
    assert weights[0, [0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert not weights.requires_grad


def test_importance_mistakes_are_named():
    for wrong in ({"low": 3.0, "high": 2.0}, {"low": -1.0}):
        with pytest.raises(ValueError, match="low"):
            importance_weights(TRAIN, ROLLOUT, THREE, **wrong)
    with pytest.raises(ValueError, match="tis, icepop, seq-mask, got 'cut'"):
        importance_weights(TRAIN, ROLLOUT, THREE, mode="cut")
    with pytest.raises(ValueError, match="level"):
        importance_weights(TRAIN, ROLLOUT, THREE, level="row")
    with pytest.raises(TypeError, match="rollout_log_probs"):
        importance_weights(TRAIN, ROLLOUT.half(), THREE)
