"""Call an advantage estimator by name: options checked, whitened at most once, metrics complete."""

from typing import Any

import torch
from torch import Tensor

from rl_core.algorithms.advantages.groups import (
    checked_rewards,
    group_metrics,
    group_statistics,
    per_row,
    reward_metrics,
    token_metrics,
)
from rl_core.algorithms.advantages.types import AdvantageInputs, AdvantageResult, Reduce
from rl_core.algorithms.advantages.whitening import clip_advantages, no_reduce
from rl_core.algorithms.advantages.whitening import whiten as whiten_values
from rl_core.algorithms.arguments import require_bool, require_rows
from rl_core.algorithms.registry import builtin, option_names, require_options, resolve
from rl_core.algorithms.stats import Stat
from rl_core.algorithms.user_functions import call, require_stats
from rl_core.api.errors import ConfigError, DataError

SELF_WHITENING = frozenset(
    builtin("advantage", name) for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
)
"""Estimators that whiten themselves; whitening their result again would be a second time."""
TOKEN_METRICS = frozenset(f"{name}/{kind}" for name in ("advantages", "returns") for kind in ("mean", "max", "min"))
"""Metrics that `compute_advantages` adds for every estimator, over trainable tokens."""


def compute_advantages(
    name: str,
    inputs: AdvantageInputs,
    *,
    clip: float | None = None,
    whiten: bool = False,
    reduce: Reduce | None = None,
    **options: Any,
) -> AdvantageResult:
    """Return the advantages of the registered estimator `name`, and the metrics that all estimators share.

    - `clip`: limit of their absolute value; None does not limit. Clipping precedes whitening, also for an estimator that whitens its
      result; only gdpo whitens first.
    - `whiten`: whiten over the trainable tokens of valid rows of all ranks.
    - `reduce`: sums a tensor over ranks; None means one rank.

    A rank without rows only calls estimators that take `reduce`. Invalid rows and masked tokens have advantage 0 and enter no metric,
    whatever the estimator returns. Raises ValueError for an unknown name or option, a missing input, and `whiten` for an estimator that
    whitens itself. Of an estimator's result, raises ConfigError for another type or shape, and DataError for an advantage of a trainable
    token that is not finite.
    """
    estimator = resolve("advantage", name)
    require_options("advantage", name, estimator, options)
    if whiten and estimator in SELF_WHITENING:
        raise ValueError(f"whiten must be false for {name}, which already whitens, got true; remove it")
    accepted, _ = option_names(estimator)
    if clip is not None and estimator in SELF_WHITENING and "whiten" in accepted:
        whiten, options["whiten"] = True, False
    if "reduce" in accepted:
        options["reduce"] = reduce or no_reduce
    if inputs.mask.shape[0] or "reduce" in accepted:
        result = _checked_result(name, call("advantage", name, estimator, inputs, **options), inputs)
    else:  # a rank left without groups; few functions of users expect none, and nobody waits for them in a reduction
        result = AdvantageResult(torch.zeros_like(inputs.mask, dtype=torch.float32))
    # Not every estimator reads `valid`. Invalid rows train nothing with any of them.
    trainable = _mask(inputs, result.advantages) & _valid_steps(inputs, result.advantages)
    advantages = torch.where(trainable, result.advantages.detach(), 0.0)
    if not torch.isfinite(advantages).all():
        index = tuple((~torch.isfinite(advantages)).nonzero()[0].tolist())
        raise DataError(
            f"advantage {name!r} must be finite where it trains, got {advantages[index].item()} in row {index[0]}; "
            "groups may have equal rewards or one valid row, so divide by no deviation that can be 0"
        )
    if clip is not None:
        advantages = clip_advantages(advantages, low=-clip, high=clip)
    if whiten:
        advantages = whiten_values(advantages, trainable, reduce=reduce)
    complete = {"rewards/mean", "groups/total"} <= set(result.metrics)
    metrics = {
        **({} if complete else _shared_metrics(inputs)),
        **{name: stat for name, stat in result.metrics.items() if name not in TOKEN_METRICS},
        **token_metrics("returns", result.returns, trainable),
        **token_metrics("advantages", advantages, trainable),
    }
    return AdvantageResult(advantages, result.returns, metrics)


def _checked_result(name: str, result: Any, inputs: AdvantageInputs) -> AdvantageResult:
    """Return what an estimator, maybe one of the user's, gave back. Raises ConfigError unless it is one advantage per token, float32."""
    if not isinstance(result, AdvantageResult):
        raise ConfigError(f"advantage {name!r} must return an AdvantageResult, got {type(result).__name__}; wrap it")
    require_stats("advantage", name, result.metrics, Stat)
    advantages, mask = result.advantages, inputs.mask
    if not isinstance(advantages, Tensor):
        raise ConfigError(f"advantage {name!r} must return a tensor, got {type(advantages).__name__}; make one")
    has_step_rewards = inputs.rewards is not None and inputs.rewards.dim() > 1
    if advantages.dtype != torch.float32 or (advantages.shape != mask.shape and not has_step_rewards):
        raise ConfigError(
            f"advantage {name!r} must return float32 in the shape of the mask {tuple(mask.shape)}, got {advantages.dtype} {tuple(advantages.shape)}; "
            "spread a row's value over its mask"
        )
    return result


def _mask(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    """Return the mask in the shape of `advantages`; embodied masks come as [B, N, C] for advantages [B, N * C]."""
    if inputs.mask.numel() == advantages.numel():
        return inputs.mask.reshape(advantages.shape)
    return torch.ones_like(advantages, dtype=torch.bool)


def _valid_steps(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    """Return `valid` [B] in the shape of `advantages`, all true without it."""
    if inputs.valid is None:
        return torch.ones_like(advantages, dtype=torch.bool)
    require_bool(valid=inputs.valid)
    require_rows("valid", inputs.valid, advantages=advantages)
    return per_row(inputs.valid, advantages).expand_as(advantages)


def _shared_metrics(inputs: AdvantageInputs) -> dict[str, Stat]:
    """Return the reward, row and group metrics, for estimators of users that report none."""
    if inputs.rewards is None or inputs.rewards.dim() != 1:
        return {}
    rewards, valid = checked_rewards(inputs.rewards, inputs.valid)
    metrics = reward_metrics(rewards, valid)
    if inputs.group_ids is not None:
        metrics |= group_metrics(group_statistics(rewards, inputs.group_ids, valid))
    return metrics
