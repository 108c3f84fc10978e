"""Filters that select the groups and rows that are trained, by rewards, truncation and log-probability errors.

Legend: B rows, T tokens.
"""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.groups import checked_group_ids, checked_rewards, group_statistics
from rl_core.algorithms.arguments import require_bool, require_choice, require_float32, require_rows, require_same_shape

STRATEGIES = ("spread", "random")


def informative_groups(
    rewards: Tensor, group_ids: Tensor, *, valid: Tensor | None = None, min_std: float = 0.0
) -> Tensor:
    """Return [B] bool, equal within a group: at least two valid rows whose sample deviation is above `min_std`.

    `rewards` [B] are the raw ones, before scaling and shaping.
    """
    clean, valid = checked_rewards(rewards, valid, group_ids=checked_group_ids(group_ids))
    statistics = group_statistics(clean, group_ids, valid)
    return (statistics.count >= 2) & (statistics.std > min_std)


def overlong_filter(valid: Tensor, truncated: Tensor, *, keep_in_baseline: bool = False) -> tuple[Tensor, Tensor]:
    """Return (`valid` [B], sample mask [B]): truncated rows train nothing.

    They also leave the reward statistics unless `keep_in_baseline`.
    """
    require_bool(valid=valid, truncated=truncated)
    require_same_shape(valid=valid, truncated=truncated)
    sample_mask = valid & ~truncated
    return (valid.clone() if keep_in_baseline else sample_mask), sample_mask


def sequence_error_mask(
    rollout_log_probs: Tensor, train_log_probs: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Return [B] bool that is true for rows to keep: those whose mean of exp|rollout - train| over trainable tokens is at most `threshold`.

    Rows without trainable tokens are false. The result narrows `mask` [B, T], so this runs before `count_normalizers`.
    """
    require_float32(rollout_log_probs=rollout_log_probs, train_log_probs=train_log_probs)
    require_bool(mask=mask)
    require_same_shape(rollout_log_probs=rollout_log_probs, train_log_probs=train_log_probs, mask=mask)
    error = torch.where(mask, rollout_log_probs.detach() - train_log_probs.detach(), 0.0).double().abs().exp()
    tokens = mask.sum(dim=1)
    mean = torch.where(mask, error, 0.0).sum(dim=1) / tokens.clamp(min=1)
    return (mean <= threshold) & (tokens > 0)


def down_sample(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    keep: int,
    strategy: str = "spread",
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return [B] bool that keeps `keep` valid rows per group, or all of them when there are fewer.

    `spread` keeps the k lowest and keep - k highest rewards, with the k that gives the largest variance (ties: the smallest k, then the
    lowest row). `random` draws with `generator`. Advantages are computed on the kept rows. Source: Xu et al., "Not All Rollouts are Useful"
    (PODS, 2025).
    """
    require_choice("strategy", strategy, STRATEGIES)
    if keep < 1:
        raise ValueError(f"keep must be at least 1 row per group, got {keep}")
    if strategy == "random" and generator is None:
        raise ValueError('strategy "random" needs a generator, got None; pass a seeded torch.Generator')
    clean, valid = checked_rewards(rewards, valid, group_ids=checked_group_ids(group_ids))
    selected = torch.zeros_like(valid)
    for members in _members(group_ids, valid):
        if len(members) <= keep:
            rows = members
        elif strategy == "random":
            rows = members[torch.randperm(len(members), generator=generator)[:keep]]
        else:
            rows = members[_widest(clean[members].tolist(), keep)]
        selected[rows] = True
    return selected


def _members(group_ids: Tensor, valid: Tensor) -> list[Tensor]:
    """Return the valid rows of each group, ascending."""
    require_rows("group_ids", group_ids, valid=valid)
    return [(valid & (group_ids == group)).nonzero().flatten() for group in group_ids.unique()]


def _widest(rewards: list[float], keep: int) -> list[int]:
    """Return the indices of the k lowest and keep - k highest `rewards` whose variance is largest."""
    ascending = sorted(range(len(rewards)), key=lambda row: (rewards[row], row))
    best: list[int] = []
    best_variance = -1.0
    for num_low in range(keep + 1):
        low = ascending[:num_low]
        descending = sorted(ascending[num_low:], key=lambda row: (-rewards[row], row))
        rows = low + descending[: keep - num_low]
        variance = _variance([rewards[row] for row in rows])
        if variance > best_variance * (1 + 1e-12):
            best, best_variance = rows, variance
    return best


def _variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)
