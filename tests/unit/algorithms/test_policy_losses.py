"""Policy losses: worked examples, gradients against float64 finite differences of the formulas, masks, errors."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from rl_core.algorithms.losses import (
    LossInputs,
    LossResult,
    cispo_loss,
    compute_policy_loss,
    decoupled_ppo_loss,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
)
from rl_core.algorithms.stats import merge_stats
from rl_core.api.errors import ConfigError

ALL = torch.ones(1, 4, dtype=torch.bool)
NEW = torch.tensor([[-0.4, -2.0, -1.1, -0.9]])
OLD = torch.tensor([[-0.6, -1.2, -1.1, -3.4]])
GAINS = torch.tensor([[2.0, 0.5, -1.0, -2.0]])


def numbers(result):
    return {name: float(stat) for name, stat in result.metrics.items()}


def test_ppo_clip_example():
    result = ppo_clip_loss(NEW, OLD, GAINS, ALL, clip_low=0.1, clip_high=0.3)
    found = numbers(result)
    assert result.loss.item() == pytest.approx(5.674379, abs=1e-5)
    assert found["clip_fraction"] == 0.0
    assert found["approx_kl"] == pytest.approx(-0.475)
    assert found["ratio_max"] == pytest.approx(12.182494)
    assert found["ratio_min"] == pytest.approx(0.449329)
    assert found["policy_loss"] == pytest.approx(5.674379, abs=1e-5)
    assert found["dual_clip_fraction"] == 0.0


def test_dual_clip_example():
    result = ppo_clip_loss(NEW, OLD, GAINS, ALL, clip_low=0.1, clip_high=0.3, dual_clip=4.0)
    assert result.loss.item() == pytest.approx(1.583133, abs=1e-6)
    assert numbers(result)["dual_clip_fraction"] == 0.25


def test_decoupled_example_interpolates_the_proximal_policy():
    one = torch.ones(1, 1, dtype=torch.bool)
    new, old = torch.tensor([[-1.5]]), torch.tensor([[-2.0]])
    versions = torch.tensor([[6]])
    result = decoupled_ppo_loss(
        new, old, torch.ones(1, 1), one, behavior_versions=versions, current_version=9, clip_high=0.5
    )
    found = numbers(result)
    assert found["ratio_mean"] == pytest.approx(1.181360, abs=1e-6)
    assert found["behavior_weight"] == pytest.approx(1.395612, abs=1e-6)
    assert result.loss.item() == pytest.approx(-1.181360 * 1.395612, abs=1e-5)
    assert (found["average_version"], found["current_version"]) == (6.0, 9.0)


@pytest.mark.parametrize("version", [-1, 8, 9], ids=["unknown", "previous", "current"])
def test_decoupled_without_age_is_ppo(version):
    versions = torch.full((1, 4), version)
    result = decoupled_ppo_loss(NEW, OLD, GAINS, ALL, behavior_versions=versions, current_version=9)
    torch.testing.assert_close(result.loss, ppo_clip_loss(NEW, OLD, GAINS, ALL).loss)


def test_decoupled_drops_and_counts_heavy_tokens():
    proximal = torch.tensor([[-0.6, -1.2, -1.1, -0.4]])
    result = decoupled_ppo_loss(NEW, OLD, GAINS, ALL, proximal_log_probs=proximal, behavior_weight_max=5.0)
    assert numbers(result)["behavior_drop_fraction"] == 0.25
    kept = ppo_clip_loss(NEW[:, :3], OLD[:, :3], GAINS[:, :3], ALL[:, :3]).loss * 3 / 4
    torch.testing.assert_close(result.loss, kept)


def clip(ratio, low, high):
    return min(max(ratio, 1 - low), 1 + high)


def ppo_token(ratio, gain, low, high, dual=None):
    value = max(-gain * ratio, -gain * clip(ratio, low, high))
    return min(value, -gain * dual) if dual is not None and gain < 0 else value


def clamped_exp(value, bound=20.0):
    return math.exp(min(max(value, -bound), bound))


def reference_loss(name, new, frozen, old, gains, mask):
    """The token-mean loss in Python floats; `frozen` is `new` where the formula stops the gradient."""
    total = 0.0
    for row in range(len(new)):
        tokens = [t for t in range(len(new[row])) if mask[row][t]]
        mean = sum(frozen[row][t] - old[row][t] for t in tokens) / max(1, len(tokens))
        for t in tokens:
            x, fixed, before, gain = new[row][t], frozen[row][t], old[row][t], gains[row][t]
            if name == "ppo_clip":
                total += ppo_token(clamped_exp(x - before), gain, 0.2, 0.28, 3.0)
            elif name == "cispo":
                total += -gain * clip(clamped_exp(fixed - before), 0.2, 0.28) * x
            elif name == "gspo":
                total += ppo_token(math.exp(mean + x - fixed), gain, 0.2, 0.28)
            elif name == "reinforce":
                total += -gain * x
            else:
                proximal = before + 2 / 3 * (fixed - before)
                total += math.exp(proximal - before) * ppo_token(clamped_exp(x - proximal), gain, 0.2, 0.28)
    return total / sum(map(sum, mask))


OPTIONS = {
    "ppo_clip": {"dual_clip": 3.0, "clip_high": 0.28},
    "cispo": {"clip_high": 0.28},
    "gspo": {"clip_low": 0.2, "clip_high": 0.28},
    "reinforce": {},
    "decoupled_ppo": {"clip_high": 0.28},
}


def random_batch(seed, *, rows=4, width=6, drift=0.3):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator)
    new = old + drift * torch.randn(rows, width, generator=generator)
    gains = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) > 0.3
    mask[0, 0] = True
    return new, old, gains, mask


def loss_by_name(name, new, old, gains, mask, **changes):
    inputs = {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": gains,
        "mask": mask,
        "behavior_versions": torch.full(mask.shape, 6),
        "current_version": 9,
    } | changes
    return compute_policy_loss(name, LossInputs(**inputs), **OPTIONS[name])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_gradient_equal_float64_finite_differences(name, seed):
    new, old, gains, mask = random_batch(seed)
    log_probs = new.clone().requires_grad_()
    result = loss_by_name(name, log_probs, old, gains, mask)
    result.loss.backward()
    plain = [tensor.double().tolist() for tensor in (new, old, gains)] + [mask.tolist()]
    frozen, step = plain[0], 1e-6

    def at(row, t, change):
        moved = [list(values) for values in plain[0]]
        moved[row][t] += change
        return reference_loss(name, moved, frozen, *plain[1:])

    assert result.loss.item() == pytest.approx(at(0, 0, 0.0), abs=1e-5)
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            slope = (at(row, t, step) - at(row, t, -step)) / (2 * step)
            assert log_probs.grad[row, t].item() == pytest.approx(slope, abs=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_nan_under_the_mask_changes_nothing(name):
    new, old, gains, mask = random_batch(5)
    gradients = []
    for spoiled in (False, True):
        tensors = [torch.where(mask, x, float("nan")) if spoiled else x.clone() for x in (new, old, gains)]
        log_probs = tensors[0].requires_grad_()
        result = loss_by_name(name, log_probs, *tensors[1:], mask, weights=torch.ones_like(new) * tensors[1] ** 0)
        result.loss.backward()
        gradients.append((result.loss.detach(), log_probs.grad, [float(s) for s in result.metrics.values()]))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    assert gradients[0][2] == gradients[1][2]
    assert gradients[1][1][~mask].abs().sum().item() == 0.0


@pytest.mark.parametrize("name", OPTIONS)
def test_all_masked_batch_backpropagates_zeros_and_reports_no_extremes(name):
    log_probs = torch.full((2, 3), float("nan"), requires_grad=True)
    nan = torch.full((2, 3), float("nan"))
    result = loss_by_name(name, log_probs, nan, nan, torch.zeros(2, 3, dtype=torch.bool))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert log_probs.grad.tolist() == [[0.0] * 3] * 2
    merged = merge_stats([result.metrics])
    assert not {"ratio_max", "ratio_min"} & set(merged)
    assert all(math.isfinite(float(stat)) for stat in merged.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_no_rows_are_accepted(name):
    empty = torch.zeros(0, 3)
    assert loss_by_name(name, empty, empty, empty, empty.bool()).loss.item() == 0.0


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "reinforce"])
def test_weights_multiply_token_losses_after_clipping(name):
    new, old, gains, mask = random_batch(6)
    weights = torch.rand(mask.shape)
    weighted, plain = (new.clone().requires_grad_() for _ in range(2))
    loss_by_name(name, weighted, old, gains, mask, weights=weights).loss.backward()
    loss_by_name(name, plain, old, gains, mask).loss.backward()
    torch.testing.assert_close(weighted.grad, plain.grad * weights)


def test_cispo_keeps_a_gradient_where_ppo_clips():
    new = torch.tensor([[1.0]]).neg().requires_grad_()
    old, gain, one = torch.tensor([[-3.0]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert torch.autograd.grad(ppo_clip_loss(new, old, gain, one).loss, new)[0].item() == 0.0
    assert torch.autograd.grad(cispo_loss(new, old, gain, one).loss, new)[0].item() == pytest.approx(-1.2)


def test_gspo_reports_sequence_ratios():
    result = gspo_loss(NEW, OLD, GAINS, ALL)
    ratio = math.exp((NEW - OLD).mean().item())
    found = numbers(result)
    assert found["ratio_mean"] == found["ratio_max"] == found["ratio_min"] == pytest.approx(ratio, rel=1e-6)


def test_log_ratio_clamp_bounds_value_and_gradient_and_is_counted():
    new = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old, gain = torch.tensor([[-50.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    result = ppo_clip_loss(new, old, gain, torch.ones(1, 2, dtype=torch.bool), log_ratio_clamp=3.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx((math.exp(3) + 1) / 2, rel=1e-6)
    assert new.grad[0, 0].item() == 0.0
    assert numbers(result)["log_ratio_clamp_fraction"] == 0.5
    assert numbers(result)["approx_kl"] == -25.0
    unbounded = ppo_clip_loss(new, old, gain, torch.ones(1, 2, dtype=torch.bool), log_ratio_clamp=None)
    assert unbounded.loss.item() > 1e20


def test_only_log_probs_carries_gradient():
    tensors = [tensor.clone().requires_grad_() for tensor in (NEW, OLD, GAINS)]
    ppo_clip_loss(*tensors, ALL, weights=torch.ones(1, 4)).loss.backward()
    assert tensors[0].grad is not None and tensors[1].grad is None and tensors[2].grad is None


def test_clip_fraction_counts_strictly_larger_clipped_branch():
    new = torch.log(torch.tensor([[1.5, 1.5, 0.5, 1.0]]))
    gains = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    result = ppo_clip_loss(new, torch.zeros(1, 4), gains, ALL)
    assert numbers(result)["clip_fraction"] == 0.5
    assert numbers(result)["clipped_ratio"] == pytest.approx((1.2 + 1.2 + 0.8 + 1.0) / 4)


def test_mistakes_are_named():
    for wrong, words in (
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp"),
        ({"aggregation": "mean"}, "aggregation"),
    ):
        with pytest.raises(ValueError, match=words):
            ppo_clip_loss(NEW, OLD, GAINS, ALL, **wrong)
    for name in ("cispo", "gspo", "reinforce"):
        inputs = LossInputs(log_probs=NEW, old_log_probs=OLD, advantages=GAINS, mask=ALL)
        with pytest.raises(ValueError, match="dual_clip"):
            compute_policy_loss(name, inputs, dual_clip=3.0)
    with pytest.raises(ValueError, match="old_log_probs"):
        compute_policy_loss("ppo_clip", LossInputs(log_probs=NEW, advantages=GAINS, mask=ALL))
    with pytest.raises(ValueError, match="proximal_log_probs.*behavior_versions"):
        decoupled_ppo_loss(NEW, OLD, GAINS, ALL)
    with pytest.raises(TypeError, match=r"old_log_probs must be float32, got torch.float64"):
        ppo_clip_loss(NEW, OLD.double(), GAINS, ALL)
    with pytest.raises(TypeError, match=r"mask must be bool"):
        reinforce_loss(NEW, GAINS, ALL.long())
    with pytest.raises(ValueError, match=r"log_probs and advantages.*\(1, 4\) and \(1, 3\)"):
        reinforce_loss(NEW, GAINS[:, :3], ALL)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda inputs: inputs.log_probs.sum(), "must return a LossResult, got Tensor"),
        (lambda inputs: LossResult(inputs.log_probs), r"must return one number, got shape \(1, 4\)"),
        (lambda inputs: LossResult(inputs.log_probs.detach().sum()), "without gradient"),
    ],
    ids=["type", "shape", "gradient"],
)
def test_what_cannot_be_trained_on_is_refused_by_the_name_of_the_loss(monkeypatch, wrong, told):
    monkeypatch.setitem(sys.modules, "own_losses", SimpleNamespace(mine=wrong))
    inputs = LossInputs(log_probs=NEW.clone().requires_grad_(), advantages=GAINS, mask=ALL)
    with pytest.raises(ConfigError, match=f"loss 'own_losses:mine' .*{told}"):
        compute_policy_loss("own_losses:mine", inputs)
