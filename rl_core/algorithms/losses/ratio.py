"""Log-ratio, clipping and metrics of ratio-based policy losses. Legend: B rows, T tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.masking import is_all_true, zero_outside
from rl_core.algorithms.stats import Stat, extreme_stats, mean_stats


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """The clipped surrogate loss per token, and which tokens were clipped."""

    values: Tensor
    clipped_ratio: Tensor
    clipped: Tensor
    """bool: the clipped branch is strictly larger."""
    dual_clipped: Tensor
    """bool: the dual clip bounds the loss; nowhere without dual clip."""


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None, log_ratio_clamp: float | None) -> None:
    """Raise ValueError for a clip range, dual clip or log-ratio clamp outside its domain."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be in [0, 1], got {clip_low}; the ratio is clipped below at 1 - clip_low")
    if not clip_high >= 0:
        raise ValueError(f"clip_high must be >= 0, got {clip_high}; the ratio is clipped above at 1 + clip_high")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip}; use None for no dual clip")
    if log_ratio_clamp is not None and not log_ratio_clamp > 0:
        raise ValueError(f"log_ratio_clamp must be positive, got {log_ratio_clamp}; use None for no clamp")


def trainable_only(mask: Tensor, **tensors: Tensor) -> list[Tensor]:
    """Return the float32 [B, T] `tensors`, in their order, with 0 at tokens that are not trained, so that NaN there reaches no arithmetic.

    Only the tensor passed as the keyword `log_probs` keeps its gradient. Raises TypeError or ValueError naming a tensor of wrong dtype or
    shape.
    """
    require_bool(mask=mask)
    require_float32(**tensors)
    require_same_shape(**tensors, mask=mask)
    inputs = [tensor if name == "log_probs" else tensor.detach() for name, tensor in tensors.items()]
    return inputs if is_all_true(mask) else [zero_outside(mask, tensor) for tensor in inputs]


def clamp_log_ratio(log_ratio: Tensor, bound: float | None) -> Tensor:
    """Return `log_ratio` limited to +-`bound`, gradient 0 outside; None does not limit."""
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> ClippedLoss:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with `dual_clip` c and A < 0 at most -A c.

    Source: Schulman et al., "PPO" (2017), equation 7; Ye et al., "Mastering Complex Control" (2020) for the dual clip.
    """
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    costs = -advantages
    plain, limited = costs * ratio, costs * clipped_ratio
    clipped = limited > plain
    values = torch.where(clipped, limited, plain)
    if dual_clip is None:
        return ClippedLoss(values, clipped_ratio, clipped, torch.zeros_like(clipped))
    bound = costs * dual_clip
    dual_clipped = (advantages < 0) & (values > bound)
    return ClippedLoss(torch.where(dual_clipped, bound, values), clipped_ratio, clipped, dual_clipped)


def ratio_metrics(
    ratio: Tensor,
    clipped: ClippedLoss,
    mask: Tensor,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    clamp_fraction: Tensor,
) -> dict[str, Stat]:
    """Return a ratio-based loss's metrics over trainable tokens; `approx_kl` is the unclamped mean of old - new."""
    count = mask.sum(dtype=torch.float64)
    means = {
        "ratio_mean": ratio,
        "clipped_ratio": clipped.clipped_ratio,
        "clip_fraction": clipped.clipped,
        "dual_clip_fraction": clipped.dual_clipped,
        "approx_kl": old_log_probs - log_probs.detach(),
        "log_ratio_clamp_fraction": clamp_fraction,
    }
    return mean_stats(means, mask, count) | extreme_stats(ratio, mask, count, prefix="ratio_")
