"""However a step is cut, losses, gradients and metrics are those of the whole."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.aggregation import AGGREGATIONS, count_normalizers
from rl_core.algorithms.kl import kl_loss
from rl_core.algorithms.losses import LossInputs, combine_losses, compute_policy_loss, entropy_term
from rl_core.algorithms.stats import finish_stats, merge_stats

LOSSES = ("ppo_clip", "cispo", "gspo", "reinforce", "decoupled_ppo")


def step_loss(name, aggregation, batch, rows, normalizers):
    def part(key):
        return batch[key][rows]

    shared = {"aggregation": aggregation, "normalizers": normalizers, "max_tokens": 16}
    inputs = LossInputs(
        log_probs=part("log_probs"),
        old_log_probs=part("old"),
        advantages=part("advantages"),
        mask=part("mask"),
        weights=part("weights"),
        behavior_versions=part("versions"),
        current_version=9,
        **shared,
    )
    policy = compute_policy_loss(name, inputs)
    kl = kl_loss(part("log_probs"), part("reference"), part("mask"), **shared)
    entropy = entropy_term(part("log_probs").exp(), part("mask"), **shared)
    return combine_losses(policy, kl=kl, kl_coefficient=0.1, entropy=entropy, entropy_coefficient=0.01)


def random_step(seed, rows):
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(rows, 7, generator=generator)

    old = -normal().abs()
    return {
        "log_probs": (old + normal(0.3)).requires_grad_(),
        "old": old,
        "reference": old + normal(0.2),
        "advantages": normal(),
        "weights": normal().abs(),
        "versions": torch.randint(-1, 10, (rows, 7), generator=generator),
        "mask": torch.rand(rows, 7, generator=generator) > 0.5,
    }


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(2, 10), cuts=st.lists(st.integers(1, 9), max_size=4))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_random_cuts_sum_to_the_whole(name, aggregation, seed, rows, cuts):
    batch = random_step(seed, rows)
    normalizers = count_normalizers(batch["mask"])
    whole = step_loss(name, aggregation, batch, slice(None), normalizers)
    whole_gradient = torch.autograd.grad(whole.loss, batch["log_probs"])[0]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    total, gradient, metrics = 0.0, torch.zeros_like(whole_gradient), []
    for a, b in itertools.pairwise(edges):
        part = step_loss(name, aggregation, batch, order[a:b], normalizers)
        gradient += torch.autograd.grad(part.loss, batch["log_probs"])[0]
        total += part.loss.item()
        metrics.append(part.metrics)
    assert total == pytest.approx(whole.loss.item(), abs=1e-6, rel=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-6, rtol=1e-6)
    assert finish_stats(merge_stats(metrics)) == pytest.approx(
        finish_stats(merge_stats([whole.metrics])), abs=1e-6, rel=1e-6
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_count_their_own_rows_and_share_the_counts(ranks):
    batch = random_step(3, 8)
    masks = batch["mask"].chunk(ranks)
    total = sum(torch.stack((m.sum(), m.any(1).sum())).double() for m in masks)
    counts = [count_normalizers(mask, reduce=lambda _: total) for mask in masks]
    assert counts == [count_normalizers(batch["mask"])] * ranks
    width = 8 // ranks
    parts = [
        step_loss("ppo_clip", "seq-mean-token-mean", batch, slice(r * width, (r + 1) * width), counts[r]).loss.item()
        for r in range(ranks)
    ]
    whole = step_loss("ppo_clip", "seq-mean-token-mean", batch, slice(None), counts[0]).loss.item()
    assert sum(parts) == pytest.approx(whole, abs=1e-6)
