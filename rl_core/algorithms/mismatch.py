"""How far the engine that sampled and the trainer are apart on the same tokens. Legend: B rows, T tokens."""

import math

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.stats import Stat, mean_stat

PREFIX = "mismatch/"
OLDEST = 8
"""Ages above are reported as this one."""


def mismatch_stats(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float],
    ages: Tensor | None = None,
    max_age: int = 0,
) -> dict[str, Stat]:
    """Return the statistics of d = train - rollout over the tokens under `mask` that the trainer's own version sampled.

    `mismatch/kl`: mean of exp(d) - 1 - d, which estimates KL(rollout || trainer); `mean_abs_diff`: mean |d|; `max_ratio`: exp(max |d|);
    `share_clipped`: share of tokens with exp(d) outside `bounds`. `ages` [B, T]: versions a token is older, None = none is; with it, kl
    and mean_abs_diff are told for each age from 1 to `max_age` too, which then also hold what was learnt since.
    A statistic over no token has count 0. Source: Schulman, "Approximating KL divergence" (2020).
    """
    require_bool(mask=mask)
    require_float32(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    require_same_shape(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    difference = torch.where(mask, train_log_probs.detach() - rollout_log_probs.detach(), 0.0).double()
    divergence, size = torch.expm1(difference) - difference, difference.abs()
    same = mask if ages is None else mask & (ages == 0)
    count = same.sum()
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    outside = (difference < low) | (difference > high)
    largest = torch.where(same, size, 0.0).amax() if size.numel() else size.new_zeros(())
    found = {
        "kl": mean_stat(divergence, same, count),
        "mean_abs_diff": mean_stat(size, same, count),
        "max_ratio": Stat("max", largest.exp(), count),
        "share_clipped": mean_stat(outside, same, count),
    }
    oldest = min(max_age, OLDEST)
    if ages is not None:
        for age in range(1, oldest + 1):
            old = mask & (ages == age if age < oldest else ages >= age)
            found |= {f"kl/age_{age}": mean_stat(divergence, old), f"mean_abs_diff/age_{age}": mean_stat(size, old)}
    return {f"{PREFIX}{name}": stat for name, stat in found.items()}
