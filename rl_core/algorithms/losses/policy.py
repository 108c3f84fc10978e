"""Policy-gradient losses on the current batch: ppo_clip, cispo, gspo, reinforce.

All take [B, T] float32 tensors with a bool mask; gradients flow into `log_probs` only. Legend: B rows, T tokens.
"""

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses.ratio import (
    ClippedLoss,
    check_clip,
    clamp_log_ratio,
    clipped_surrogate,
    ratio_metrics,
    trainable_only,
)
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.stats import sum_stat


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    weights: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the clipped surrogate loss; clip_high > clip_low is DAPO's asymmetric clip.

    Source: Schulman et al., "PPO" (2017); Yu et al., "DAPO" (2025). Metrics as in `ratio_metrics`, `policy_loss`.
    Raises ValueError for a clip outside its domain, TypeError for a dtype other than float32 (mask: bool).
    """
    check_clip(clip_low, clip_high, dual_clip, log_ratio_clamp)
    new, old, gains = trainable_only(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    difference = new - old
    limited = clamp_log_ratio(difference, log_ratio_clamp)
    ratio = limited.exp()
    clipped = clipped_surrogate(ratio, gains, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss = weighted_aggregate(clipped.values, mask, weights, aggregation, normalizers, max_tokens)
    return _with_metrics(loss, ratio, clipped, mask, log_probs=new, old_log_probs=old, clamped=limited != difference)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    log_ratio_clamp: float | None = 20.0,
    weights: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return REINFORCE weighted by the clipped ratio without gradient, so that every token keeps a gradient.

    clip_low 1.0 leaves the ratio unclipped below. Source: MiniMax, "MiniMax-M1" (2025).
    Metrics and errors as `ppo_clip_loss`.
    """
    check_clip(clip_low, clip_high, None, log_ratio_clamp)
    new, old, gains = trainable_only(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    difference = new.detach() - old
    limited = clamp_log_ratio(difference, log_ratio_clamp)
    ratio = limited.exp()
    clipped = clipped_surrogate(ratio, gains, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    values = -gains * clipped.clipped_ratio * new
    loss = weighted_aggregate(values, mask, weights, aggregation, normalizers, max_tokens)
    return _with_metrics(loss, ratio, clipped, mask, log_probs=new, old_log_probs=old, clamped=limited != difference)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_clamp: float | None = 20.0,
    weights: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the clipped surrogate on the geometric mean ratio of each row (GSPO-token).

    Every trainable token of a row has the row's ratio s as its value, and s times the gradient of its own log-probability, which stays
    correct when advantages differ within a row. `log_ratio_clamp` limits the log-ratio of each token, before the mean. The paper's
    objective needs `aggregation="seq-mean-token-mean"`. Source: Zheng et al., "GSPO" (2025), sections 4.1 and 4.3. Metrics (of the row's
    ratio) and errors as `ppo_clip_loss`.
    """
    check_clip(clip_low, clip_high, None, log_ratio_clamp)
    new, old, gains = trainable_only(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    difference = new.detach() - old
    limited = clamp_log_ratio(difference, log_ratio_clamp)
    row_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    row_mean = (limited.sum(dim=1, keepdim=True, dtype=torch.float64) / row_tokens).float()
    # The bracket is 0 as a number: it only carries each token's gradient.
    ratio = (row_mean + (new - new.detach())).exp()
    clipped = clipped_surrogate(ratio, gains, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    loss = weighted_aggregate(clipped.values, mask, weights, aggregation, normalizers, max_tokens)
    return _with_metrics(loss, ratio, clipped, mask, log_probs=new, old_log_probs=old, clamped=limited != difference)


def reinforce_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the aggregated -A log p. Metric `policy_loss`; errors as in `aggregate`. Source: Williams (1992)."""
    new, gains = trainable_only(mask, log_probs=log_probs, advantages=advantages)
    loss = weighted_aggregate(-gains * new, mask, weights, aggregation, normalizers, max_tokens)
    return LossResult(loss, {"policy_loss": sum_stat(loss)})


def _with_metrics(
    loss: Tensor,
    ratio: Tensor,
    clipped: ClippedLoss,
    mask: Tensor,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    clamped: Tensor,
) -> LossResult:
    """Return `loss` with its own statistic and those of the ratios."""
    metrics = ratio_metrics(
        ratio, clipped, mask, log_probs=log_probs, old_log_probs=old_log_probs, clamp_fraction=clamped
    )
    return LossResult(loss, {"policy_loss": sum_stat(loss), **metrics})
