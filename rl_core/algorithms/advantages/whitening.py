"""What is done to advantages after the estimator: whitening over the whole data-parallel batch, and clipping."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.types import Reduce
from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape

_SMALLEST_VARIANCE = 1e-8


def whiten(values: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Return (x - mean) / sqrt(max(variance, 1e-8)) where `mask`, 0 elsewhere; shape and float32 of `values` kept.

    Mean and population variance are over the true entries of all data-parallel ranks: `reduce` sums float64 tensors
    over ranks and is called exactly twice, on every rank, also where this rank's mask is empty. No entry at all
    anywhere gives zeros. Raises TypeError for values that are not float32 or a mask that is not bool.
    """
    require_float32(values=values)
    require_bool(mask=mask)
    require_same_shape(values=values, mask=mask)
    reduce = reduce or no_reduce
    masked = torch.where(mask, values.detach(), 0.0).double()
    total, count = reduce(torch.stack((masked.sum(), mask.sum().double()))).unbind()
    count = count.clamp(min=1)
    centred = torch.where(mask, masked - total / count, 0.0)
    variance = reduce((centred**2).sum()) / count
    return (centred / variance.clamp(min=_SMALLEST_VARIANCE).sqrt()).float()


def clip_advantages(advantages: Tensor, *, low: float | None = None, high: float | None = None) -> Tensor:
    """Return `advantages` limited to [low, high]; None leaves that side open. ValueError when low > high."""
    require_float32(advantages=advantages)
    if low is not None and high is not None and low > high:
        raise ValueError(f"clip_advantages low must be <= high, got {low} and {high}; swap them")
    if low is None and high is None:
        return advantages
    return advantages.clamp(low, high)


def no_reduce(value: Tensor) -> Tensor:
    """Return `value` unchanged. Used as `reduce` when there is one rank."""
    return value
