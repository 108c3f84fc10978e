"""The critic's loss and how much of the returns it explains. Legend: B rows, T tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.masking import is_all_true, zero_outside
from rl_core.algorithms.stats import mean_stat, mean_stats, sum_stat


def critic_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
    huber_delta: float | None = 10.0,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the aggregated Huber loss of returns - values over `mask` [B, T]. Gradients flow into `values` only.

    h(e) = e^2 / 2 up to `huber_delta`, then linear (None: e^2 / 2 everywhere). With `value_clip` c the loss is the larger of h(R - v) and
    h(R - v'), where v' = old_values + clamp(v - old_values, -c, c). Metrics: `value_loss`, `values`, `returns` and, with clipping,
    `value_clip_ratio` (fraction with |v - old| > c). Source: Schulman et al., "PPO" (2017) code. Raises ValueError for a clip without
    `old_values` or a bound that is not positive.
    """
    _check_bounds(value_clip, huber_delta, old_values)
    require_bool(mask=mask)
    require_float32(values=values, returns=returns, old_values=old_values)
    require_same_shape(values=values, returns=returns, mask=mask, old_values=old_values)
    predicted, target = values, returns.detach()
    if not is_all_true(mask):
        predicted, target = zero_outside(mask, predicted), zero_outside(mask, target)
    token_loss = _huber(predicted, target, huber_delta)
    count = mask.sum(dtype=torch.float64)
    metrics = mean_stats({"values": predicted, "returns": target}, mask, count)
    if value_clip is not None and old_values is not None:
        old = zero_outside(mask, old_values.detach())
        change = predicted - old
        clipped = old + change.clamp(-value_clip, value_clip)
        token_loss = torch.maximum(token_loss, _huber(clipped, target, huber_delta))
        metrics["value_clip_ratio"] = mean_stat(change.abs() > value_clip, mask, count)
    loss = weighted_aggregate(token_loss, mask, None, aggregation, normalizers, max_tokens)
    return LossResult(loss, {"value_loss": sum_stat(loss), **metrics})


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Callable[[Tensor], Tensor] | None = None
) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the true tokens of all ranks; 0.0 when Var(returns) = 0.

    `reduce` sums float64 tensors over ranks and is called twice on every rank.
    """
    require_bool(mask=mask)
    require_float32(values=values, returns=returns)
    require_same_shape(values=values, returns=returns, mask=mask)
    target = torch.where(mask, returns.detach(), 0.0).double()
    error = torch.where(mask, returns.detach() - values.detach(), 0.0).double()
    sums = torch.stack((mask.sum().double(), target.sum(), error.sum()))
    count, target_sum, error_sum = (reduce(sums) if reduce else sums).unbind()
    count = count.clamp(min=1)
    squares = torch.stack(
        [
            torch.where(mask, tensor - total / count, 0.0).square().sum()
            for tensor, total in ((target, target_sum), (error, error_sum))
        ]
    )
    target_variation, error_variation = (reduce(squares) if reduce else squares).tolist()
    return 1.0 - error_variation / target_variation if target_variation > 0 else 0.0


def _check_bounds(value_clip: float | None, huber_delta: float | None, old_values: Tensor | None) -> None:
    for name, bound in (("value_clip", value_clip), ("huber_delta", huber_delta)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} must be positive, got {bound}; use None for none")
    if value_clip is not None and old_values is None:
        raise ValueError(
            f"value_clip needs old_values, got value_clip {value_clip} and None; pass them or set it to None"
        )


def _huber(values: Tensor, target: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return (target - values).square() / 2
    return functional.huber_loss(values, target, reduction="none", delta=delta)
