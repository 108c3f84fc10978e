"""REINFORCE++: token rewards summed to the end of the row, with KL in the reward and one batch-wide whitening.

Legend: B rows, T tokens.
"""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.groups import (
    checked_group_ids,
    checked_rewards,
    group_metrics,
    group_statistics,
    reward_metrics,
)
from rl_core.algorithms.advantages.types import AdvantageResult, Reduce
from rl_core.algorithms.advantages.whitening import whiten as whiten_values
from rl_core.algorithms.arguments import require_choice, require_same_shape, require_token_mask
from rl_core.algorithms.kl import kl_penalty
from rl_core.algorithms.stats import Stat, mean_stat

BASELINES = ("none", "group_mean")


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
    baseline: str = "none",
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k1",
    whiten: bool = True,
    reduce: Reduce | None = None,
) -> AdvantageResult:
    """Return the sum of rewards at and after each trainable token, whitened over the tokens of all ranks, [B, T] float32.

    The reward [B] of a row counts at its last trainable token. `kl_coefficient` times the per-token KL is subtracted from each token's
    reward and reported as `kl`. `baseline="group_mean"` first subtracts the mean of the group's valid rewards. `returns` are the sums
    before whitening. Source: Hu, "REINFORCE++" (2025). Raises ValueError for an unknown baseline, group_mean without group_ids, or a KL
    without log-probabilities.
    """
    require_choice("baseline", baseline, BASELINES)
    require_token_mask(mask)
    clean, valid = checked_rewards(rewards, valid, mask=mask, group_ids=group_ids)
    metrics = reward_metrics(clean, valid)
    if baseline == "group_mean":
        clean, group_stats = _minus_group_mean(clean, group_ids, valid)
        metrics |= group_stats
    trainable = mask & valid.unsqueeze(1)
    shaped_rewards, kl_stats = token_rewards(
        clean,
        trainable,
        log_probs=log_probs,
        ref_log_probs=ref_log_probs,
        kl_coefficient=kl_coefficient,
        kl_estimator=kl_estimator,
    )
    metrics |= kl_stats
    returns = torch.where(trainable, suffix_sums(shaped_rewards), 0.0).float()
    advantages = whiten_values(returns, trainable, reduce=reduce) if whiten else returns
    return AdvantageResult(advantages, returns, metrics)


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    *,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k1",
) -> tuple[Tensor, dict[str, Stat]]:
    """Return [B, T] float64: the reward [B] at each row's last true token of `mask`, minus `kl_coefficient` x KL at each; metric `kl`.

    Rewards of rows without a true token may be NaN. Raises ValueError for a KL without log-probabilities.
    """
    placed = _terminal(rewards.detach().double(), mask)
    if not kl_coefficient:
        return placed, {}
    kl = _token_kl(log_probs, ref_log_probs, mask, kl_estimator)
    return placed - kl_coefficient * kl, {"kl": mean_stat(kl, mask)}


def suffix_sums(values: Tensor) -> Tensor:
    """Return the sum of `values` [B, T] at and after each token."""
    return values.flip(1).cumsum(1).flip(1)


def _terminal(rewards: Tensor, mask: Tensor) -> Tensor:
    is_last = mask & (suffix_sums(mask.long()) == 1)
    return torch.where(is_last, rewards.unsqueeze(1), 0.0)


def _minus_group_mean(rewards: Tensor, group_ids: Tensor | None, valid: Tensor) -> tuple[Tensor, dict[str, Stat]]:
    if group_ids is None:
        raise ValueError('baseline "group_mean" needs group_ids, got None; pass them or use baseline "none"')
    statistics = group_statistics(rewards, checked_group_ids(group_ids), valid)
    return torch.where(valid, rewards - statistics.mean, 0.0), group_metrics(statistics)


def _token_kl(log_probs: Tensor | None, ref_log_probs: Tensor | None, mask: Tensor, estimator: str) -> Tensor:
    if log_probs is None or ref_log_probs is None:
        missing = "log_probs" if log_probs is None else "ref_log_probs"
        raise ValueError(
            f"kl_coefficient needs log_probs and ref_log_probs, got {missing} None; pass both or set it to 0"
        )
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    masked = [torch.where(mask, values.detach(), 0.0) for values in (log_probs, ref_log_probs)]
    return torch.where(mask, kl_penalty(*masked, estimator=estimator).double(), 0.0)
