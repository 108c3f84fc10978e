"""Weights that correct for the difference between the engine that sampled and the trainer. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_choice, require_float32, require_same_shape
from rl_core.algorithms.stats import Stat, extreme_stats, mean_stat, sum_stat

DEFAULT_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq-mask": (0.999, 1.002)}
"""Mode -> (low, high)."""
LEVELS = ("token", "sequence")


def importance_weights(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    mode: str = "tis",
    level: str = "token",
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, dict[str, Stat]]:
    """Return (weights [B, T] float32 without gradient, metrics) from w = exp(train - rollout), 0 where masked.

    `train_log_probs` are the trainer's before the update. `level="sequence"`: w = exp of the row's sum, at each of its
    tokens. `tis` limits w to [low, high]; `icepop` sets w outside to 0; `seq-mask` sets w to 0 for rows whose geometric
    mean ratio lies outside. Weights that are not finite are 0. None bounds are the mode's (`DEFAULT_BOUNDS`).
    Metrics: `is_weight`, `is_weight_max`, `is_oob_fraction`, `is_rows_dropped`, `logprob_abs_diff`,
    `logprob_error_multiplier`. Source: Yao et al., "truncated importance sampling" (2025); "IcePop" (2025).
    Raises ValueError for an unknown mode or level, low > high, or a negative low.
    """
    require_choice("mode", mode, tuple(DEFAULT_BOUNDS))
    require_choice("level", level, LEVELS)
    low, high = _bounds(mode, low, high)
    require_bool(mask=mask)
    require_float32(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    require_same_shape(train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    difference = torch.where(mask, train_log_probs.detach() - rollout_log_probs.detach(), 0.0)
    row_sum = difference.sum(dim=1, keepdim=True, dtype=torch.float64)
    exponent = row_sum if level == "sequence" else difference.double()
    ratio = exponent.exp().float().expand_as(difference)
    checked = ratio
    if mode == "seq-mask":
        tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
        checked = (row_sum / tokens).exp().expand_as(difference)
    outside = ~((checked >= low) & (checked <= high))
    weights = ratio.clamp(low, high) if mode == "tis" else torch.where(outside, 0.0, ratio)
    weights = torch.where(mask & torch.isfinite(ratio), weights, 0.0)
    return weights, _metrics(weights, outside, difference, mask)


def _bounds(mode: str, low: float | None, high: float | None) -> tuple[float, float]:
    default_low, default_high = DEFAULT_BOUNDS[mode]
    low, high = default_low if low is None else low, default_high if high is None else high
    if not 0 <= low <= high:
        raise ValueError(f"importance bounds must hold 0 <= low <= high, got low {low} and high {high}")
    return low, high


def _metrics(weights: Tensor, outside: Tensor, difference: Tensor, mask: Tensor) -> dict[str, Stat]:
    count = mask.sum()
    dropped = mask.any(dim=1) & ~(weights > 0).any(dim=1)
    return {
        "is_weight": mean_stat(weights, mask, count),
        **extreme_stats(weights, mask, prefix="is_weight_", kinds=("max",)),
        "is_oob_fraction": mean_stat(outside, mask, count),
        "is_rows_dropped": sum_stat(dropped.sum()),
        "logprob_abs_diff": mean_stat(difference.abs(), mask, count),
        "logprob_error_multiplier": mean_stat(difference.double().abs().exp(), mask, count),
    }
