"""Decoupled PPO for tokens of older policy versions: the trust region is around a proximal policy instead of the one that sampled.

- `log_probs`: current policy, which is trained.
- `old_log_probs`: behaviour policy, which sampled the tokens.
- `proximal_log_probs`: policy before this update.

Legend: B rows, T tokens.
"""

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.arguments import require_same_shape
from rl_core.algorithms.losses.ratio import (
    check_clip,
    clamp_log_ratio,
    clipped_surrogate,
    ratio_metrics,
    trainable_only,
)
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.stats import Stat, mean_stat, sum_stat


def decoupled_ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    proximal_log_probs: Tensor | None = None,
    behavior_versions: Tensor | None = None,
    current_version: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behavior_weight_max: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return exp(p - old) times the clipped surrogate with ratio exp(log_probs - p), p the proximal log-probability.

    p is `proximal_log_probs`, else it is interpolated between old and current by the token's age: with behaviour
    version v and current version c, p = old + alpha (current - old), alpha = (c - 1 - v) / (c - v), 0 for v < 0 or
    v >= c - 1. Tokens whose weight exp(p - old) exceeds `behavior_weight_max` get loss 0 and are counted.
    Metrics as `ppo_clip_loss`, and `behavior_weight`, `behavior_drop_fraction`, `average_version`, `current_version`.
    Source: Hilton et al., "Batch size-invariance" (2022); Fu et al., "AReaL" (2025).
    Raises ValueError without a proximal policy or versions, and for a clip outside its domain.
    """
    check_clip(clip_low, clip_high, dual_clip, log_ratio_clamp)
    if behavior_weight_max is not None and not behavior_weight_max > 0:
        raise ValueError(f"behavior_weight_max must be positive, got {behavior_weight_max}; use None for no limit")
    new, old, gains = trainable_only(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    proximal = _proximal(new, old, mask, proximal_log_probs, behavior_versions, current_version)
    difference = new - proximal
    limited = clamp_log_ratio(difference, log_ratio_clamp)
    ratio = limited.exp()
    clipped = clipped_surrogate(ratio, gains, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = clamp_log_ratio(proximal - old, log_ratio_clamp).exp()
    dropped = torch.zeros_like(mask) if behavior_weight_max is None else weight > behavior_weight_max
    values = torch.where(dropped, 0.0, weight * clipped.values)
    loss = weighted_aggregate(values, mask, None, aggregation, normalizers, max_tokens)
    metrics = ratio_metrics(
        ratio, clipped, mask, log_probs=new, old_log_probs=old, clamp_fraction=limited != difference
    )
    metrics |= {
        "policy_loss": sum_stat(loss),
        "behavior_weight": mean_stat(weight, mask),
        "behavior_drop_fraction": mean_stat(dropped, mask),
        **_version_metrics(behavior_versions, current_version, mask),
    }
    return LossResult(loss, metrics)


def _proximal(
    new: Tensor,
    old: Tensor,
    mask: Tensor,
    proximal_log_probs: Tensor | None,
    behavior_versions: Tensor | None,
    current_version: int | None,
) -> Tensor:
    if proximal_log_probs is not None:
        return trainable_only(mask, proximal_log_probs=proximal_log_probs)[0]
    if behavior_versions is None or current_version is None:
        raise ValueError(
            "decoupled_ppo needs proximal_log_probs, or behavior_versions and current_version, got neither; pass one"
        )
    require_same_shape(behavior_versions=behavior_versions, mask=mask)
    age = (current_version - behavior_versions).float()
    interpolated = (behavior_versions >= 0) & (age > 1)
    alpha = torch.where(interpolated, (age - 1) / age.clamp(min=1), 0.0)
    return old + alpha * (new.detach() - old)


def _version_metrics(versions: Tensor | None, current_version: int | None, mask: Tensor) -> dict[str, Stat]:
    metrics = {}
    if versions is not None:
        metrics["average_version"] = mean_stat(versions.double(), mask & (versions >= 0))
    if current_version is not None:
        metrics["current_version"] = Stat("max", torch.as_tensor(float(current_version)), torch.ones(()))
    return metrics
