"""Call an advantage estimator by name: options checked, whitened at most once, metrics complete."""

from typing import Any

import torch
from torch import Tensor

from rl_core.algorithms.advantages.groups import (
    checked_rewards,
    group_metrics,
    group_statistics,
    reward_metrics,
    token_metrics,
)
from rl_core.algorithms.advantages.registered import SELF_WHITENING
from rl_core.algorithms.advantages.types import AdvantageInputs, AdvantageResult, Reduce
from rl_core.algorithms.advantages.whitening import whiten as whiten_values
from rl_core.algorithms.binding import option_names, require_options
from rl_core.algorithms.registry import resolve
from rl_core.algorithms.stats import Stat


def compute_advantages(
    name: str, inputs: AdvantageInputs, *, whiten: bool = False, reduce: Reduce | None = None, **options: Any
) -> AdvantageResult:
    """Return the advantages of the registered estimator `name` and the metrics all estimators share.

    `whiten` whitens over the trainable tokens of valid rows of all ranks; `reduce` sums over ranks (None = this rank).
    Raises ValueError for an unknown name or option, a missing input, and `whiten` on an estimator that whitens itself.
    """
    estimator = resolve("advantage", name)
    require_options("advantage", name, estimator, options)
    if whiten and estimator in SELF_WHITENING:
        raise ValueError(f"whiten must be false for {name}, which already whitens, got true; remove it")
    if "reduce" in option_names(estimator)[0]:
        options["reduce"] = reduce
    result: AdvantageResult = estimator(inputs, **options)
    trainable = _trainable(inputs, result.advantages)
    advantages = whiten_values(result.advantages, trainable, reduce=reduce) if whiten else result.advantages
    metrics = {
        **({} if "groups/total" in result.metrics else _shared_metrics(inputs)),
        **token_metrics("returns", result.returns, trainable),
        **result.metrics,
        **token_metrics("advantages", advantages, trainable),
    }
    return AdvantageResult(advantages, result.returns, metrics)


def _trainable(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    """Return where `advantages` train; embodied masks come as [B, N, C] for advantages [B, N * C]."""
    mask = inputs.mask
    if inputs.valid is not None:
        mask = mask & inputs.valid.reshape(-1, *[1] * (mask.dim() - 1))
    if mask.numel() == advantages.numel():
        return mask.reshape(advantages.shape)
    return torch.ones_like(advantages, dtype=torch.bool)


def _shared_metrics(inputs: AdvantageInputs) -> dict[str, Stat]:
    """Return the reward, row and group metrics, for estimators of users that report none."""
    if inputs.rewards is None or inputs.rewards.dim() != 1:
        return {}
    rewards, valid = checked_rewards(inputs.rewards, inputs.valid)
    metrics = reward_metrics(rewards, valid)
    if inputs.group_ids is not None:
        metrics |= group_metrics(group_statistics(rewards, inputs.group_ids, valid))
    return metrics
