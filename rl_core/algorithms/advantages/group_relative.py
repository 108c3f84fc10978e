"""Advantages that compare the samples of one prompt: GRPO and RLOO. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.groups import (
    checked_group_ids,
    checked_rewards,
    group_metrics,
    group_statistics,
    per_row,
    reward_metrics,
)
from rl_core.algorithms.advantages.types import AdvantageResult
from rl_core.algorithms.arguments import require_bool, require_choice, require_rows

BASELINES = ("group_mean", "leave_one_out")
SCALES = ("group_std", "none")


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    valid: Tensor | None = None,
    baseline: str = "group_mean",
    scale: str = "group_std",
    eps: float = 1e-6,
) -> AdvantageResult:
    """Return (r - b) / (s + eps) of each row, copied to its trainable tokens, [B, T] float32.

    b is the mean of the group's valid rewards, or of the other rows' for `leave_one_out`; s is the group's sample
    deviation, or 1 without eps for `scale="none"`. Exactly 0 where all rewards of a group are equal, where a group has
    one valid row, and in invalid rows. Rewards [B] count also when their row has no trainable token.
    Source: Shao et al., "DeepSeekMath" (2024), equation 3; Liu et al., "Understanding R1-Zero" (2025) for scale none.
    Raises ValueError for an unknown baseline or scale, unequal shapes, or a non-finite reward in a valid row.
    """
    require_choice("baseline", baseline, BASELINES)
    require_choice("scale", scale, SCALES)
    require_bool(mask=mask)
    clean, valid = checked_rewards(rewards, valid, group_ids=checked_group_ids(group_ids), mask=mask)
    statistics = group_statistics(clean, group_ids, valid)
    row = clean - statistics.mean
    if baseline == "leave_one_out":
        row = row * statistics.count / (statistics.count - 1).clamp(min=1)
    if scale == "group_std":
        row = row / (statistics.std + eps)
    usable = valid & (statistics.std > 0)
    advantages = broadcast_to_tokens(torch.where(usable, row, 0.0), mask)
    return AdvantageResult(advantages, None, {**reward_metrics(clean, valid), **group_metrics(statistics)})


def rloo_advantages(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, valid: Tensor | None = None
) -> AdvantageResult:
    """Return r minus the mean of the group's other valid rewards, copied to the row's trainable tokens, [B, T] float32.

    Source: Ahmadian et al., "Back to Basics" (2024). Errors as in `grpo_advantages`.
    """
    return grpo_advantages(rewards, group_ids, mask, valid=valid, baseline="leave_one_out", scale="none")


def raw_advantages(rewards: Tensor, mask: Tensor, *, valid: Tensor | None = None) -> AdvantageResult:
    """Return the reward of each row copied to its trainable tokens, [B, T] float32; 0 in invalid rows."""
    require_bool(mask=mask)
    clean, valid = checked_rewards(rewards, valid, mask=mask)
    return AdvantageResult(broadcast_to_tokens(clean, mask), None, reward_metrics(clean, valid))


def broadcast_to_tokens(row_values: Tensor, mask: Tensor) -> Tensor:
    """Return `row_values` [B] copied to the true entries of `mask` [B, T] (or [B, N, C]) as float32, 0 elsewhere."""
    require_rows("row values", row_values, mask=mask)
    return torch.where(mask, per_row(row_values.float(), mask), 0.0)
