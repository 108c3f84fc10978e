"""Statistics of prompt groups and the metrics every estimator reports.

A group is the rows with equal `group_ids`, in any order; never the rows with equal prompt tokens, which would merge a
prompt that was drawn twice. Legend: B rows, G groups, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_int64, require_rows
from rl_core.algorithms.stats import Stat, extreme_stats, mean_stat, std_stat, sum_stat


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per-row view [B] of the statistics of the row's group over its valid rows, float64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """Sample deviation (n - 1); exactly 0 where all rewards are equal or n < 2."""
    group_sizes: Tensor
    """[G] valid rows per group."""
    group_equal: Tensor
    """[G] bool: at least two valid rows and all rewards equal."""


def group_statistics(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> GroupStatistics:
    """Return the statistics of finite float64 `rewards` [B] by group, in two passes (no E[x^2] - E[x]^2)."""
    groups, row_groups = torch.unique(group_ids, return_inverse=True)
    num_groups = groups.shape[0]

    def summed(values: Tensor) -> Tensor:
        zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
        return zeros.index_add_(0, row_groups, torch.where(valid, values, 0).double())

    sizes = summed(torch.ones_like(rewards))
    mean = (summed(rewards) / sizes.clamp(min=1))[row_groups]
    equal = _all_equal(rewards, row_groups, valid, num_groups)
    variance = summed((rewards - mean) ** 2) / (sizes - 1).clamp(min=1)
    std = torch.where(equal, 0.0, variance.sqrt())[row_groups]
    return GroupStatistics(
        count=sizes[row_groups], mean=mean, std=std, group_sizes=sizes, group_equal=equal & (sizes >= 2)
    )


def checked_rewards(rewards: Tensor, valid: Tensor | None, **others: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (`rewards` [B] as float64 with 0 in invalid rows, `valid` [B] bool).

    Raises TypeError for a wrong dtype, ValueError for other shapes or a reward that is not finite in a valid row.
    """
    require_bool(valid=valid)
    require_rows("rewards", rewards, valid=valid, **others)
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    cleaned = torch.where(valid, rewards.detach().double(), 0.0)
    if not torch.isfinite(cleaned).all():
        rows = (~torch.isfinite(cleaned)).nonzero().flatten().tolist()
        raise ValueError(
            f"rewards must be finite in valid rows, got {cleaned[rows[0]].item()} in row {rows[0]}; "
            "mark failed rows invalid"
        )
    return cleaned, valid


def checked_group_ids(group_ids: Tensor) -> Tensor:
    """Return `group_ids` [B] after checking that they are int64."""
    require_int64(group_ids=group_ids)
    return group_ids


def reward_metrics(rewards: Tensor, valid: Tensor) -> dict[str, Stat]:
    """Return `rewards/{mean,max,min,std}` over valid rows and `rows/{total,invalid}`."""
    count = valid.sum()
    return {
        "rewards/mean": mean_stat(rewards, valid, count),
        **extreme_stats(rewards, valid, prefix="rewards/"),
        "rewards/std": std_stat(rewards, valid, count),
        "rows/total": sum_stat(rewards.shape[0]),
        "rows/invalid": sum_stat((~valid).sum()),
    }


def group_metrics(statistics: GroupStatistics) -> dict[str, Stat]:
    """Return the metrics `groups/total` (all groups), `groups/degenerate` and `groups/zero_std`.

    A degenerate group has fewer than two valid rows; zero_std counts groups with at least two whose rewards are all equal.
    """
    return {
        "groups/total": sum_stat(statistics.group_sizes.shape[0]),
        "groups/degenerate": sum_stat((statistics.group_sizes < 2).sum()),
        "groups/zero_std": sum_stat(statistics.group_equal.sum()),
    }


def per_row(row_values: Tensor, like: Tensor) -> Tensor:
    """Return `row_values` [B] as a view that broadcasts against the rows of `like` [B, ...]."""
    return row_values.reshape(-1, *[1] * (like.dim() - 1))


def token_metrics(name: str, values: Tensor | None, mask: Tensor) -> dict[str, Stat]:
    """Return `{name}/{mean,max,min}` of per-token `values` where `mask`; nothing for None."""
    if values is None:
        return {}
    return {f"{name}/mean": mean_stat(values, mask), **extreme_stats(values, mask, prefix=f"{name}/")}


def _all_equal(rewards: Tensor, row_groups: Tensor, valid: Tensor, num_groups: int) -> Tensor:
    """Return [G] bool: the group's largest valid reward is its smallest (or it has none)."""

    def extreme(kind: str, fill: float) -> Tensor:
        start = torch.full((num_groups,), fill, dtype=rewards.dtype, device=rewards.device)
        return start.scatter_reduce_(0, row_groups, torch.where(valid, rewards, fill), kind)

    return extreme("amax", float("-inf")) <= extreme("amin", float("inf"))
