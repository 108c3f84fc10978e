"""How far the log-probabilities of the sampling engine and of the trainer are apart on the same tokens. Legend: B rows, T tokens."""

import math

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.stats import Stat, mean_stat

PREFIX = "mismatch/"
PARTS = "rollout/mismatch_"
"""Prefix of the same numbers over a part of the tokens."""
LENGTHS = (0, 256, 1024, 4096, 16384)
"""Lower bounds of the classes by number of trained tokens of a row."""
OLDEST = 8
"""Largest age that is reported; older tokens count as this age."""


def mismatch_stats(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float],
    ages: Tensor | None = None,
    max_age: int = 0,
) -> dict[str, Stat]:
    """Return statistics of d = train - rollout log-probability over the tokens under `mask` that the trainer's own version sampled.

    - `mismatch/kl`: mean of exp(d) - 1 - d, which estimates KL(rollout || trainer).
    - `mismatch/mean_abs_diff`: mean of |d|. `mismatch/max_ratio`: exp(max |d|).
    - `mismatch/share_clipped`: fraction of tokens with exp(d) outside `bounds`.
    - `rollout/mismatch_kl/length_N`: kl of rows with at least N trained tokens and fewer than the next of LENGTHS.
    - `rollout/mismatch_kl/age_N`, `rollout/mismatch_abs_diff/age_N`: the same for tokens of each age from 1 to `max_age`. They also contain
      the change of the policy since that version.

    `ages` [B, T] is the number of versions by which a token is older than the trainer's; None means that no token is older. A statistic
    over no token has count 0. Source: Schulman, "Approximating KL divergence" (2020).
    """
    require_bool(mask=mask)
    require_float32(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    require_same_shape(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    difference = torch.where(mask, train_log_probs.detach() - rollout_log_probs.detach(), 0.0).double()
    divergence, magnitude = torch.expm1(difference) - difference, difference.abs()
    own_version = mask if ages is None else mask & (ages == 0)
    count = own_version.sum()
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    outside = (difference < low) | (difference > high)
    largest = torch.where(own_version, magnitude, 0.0).amax() if magnitude.numel() else magnitude.new_zeros(())
    stats = {
        "kl": mean_stat(divergence, own_version, count),
        "mean_abs_diff": mean_stat(magnitude, own_version, count),
        "max_ratio": Stat("max", largest.exp(), count),
        "share_clipped": mean_stat(outside, own_version, count),
    }
    part_stats = _by_length(divergence, mask, own_version)
    oldest = min(max_age, OLDEST)
    if ages is not None:
        for age in range(1, oldest + 1):
            aged = mask & (ages == age if age < oldest else ages >= age)
            part_stats |= {
                f"kl/age_{age}": mean_stat(divergence, aged),
                f"abs_diff/age_{age}": mean_stat(magnitude, aged),
            }
    return {f"{PREFIX}{name}": stat for name, stat in stats.items()} | {f"{PARTS}{n}": s for n, s in part_stats.items()}


def _by_length(divergence: Tensor, mask: Tensor, own_version: Tensor) -> dict[str, Stat]:
    """Return the mean divergence over `own_version` by the number of tokens under `mask` in the row."""
    classes = torch.bucketize(mask.sum(-1), torch.tensor(LENGTHS[1:], device=mask.device), right=True)
    totals = divergence.new_zeros(len(LENGTHS)).index_add_(
        0, classes, torch.where(own_version, divergence, 0.0).sum(-1)
    )
    counts = totals.new_zeros(len(LENGTHS)).index_add_(0, classes, own_version.sum(-1).to(totals.dtype))
    return {f"kl/length_{low}": Stat("mean", totals[index], counts[index]) for index, low in enumerate(LENGTHS)}
