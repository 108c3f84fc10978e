"""Aggregates per-token values to one number that does not depend on how the step is split over micro-batches and ranks.

The actor counts the step's tokens and sequences once over all micro-batches and data-parallel ranks and passes the
counts in; every micro-batch then returns its share, and shares are added.

Legend: B rows (completions), T tokens; rows are the first dimension of every tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_choice, require_same_shape
from rl_core.algorithms.masking import zero_outside

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True)
class LossNormalizers:
    """Counts of one optimizer step, over all of its micro-batches and data-parallel ranks."""

    tokens: float
    """Trainable tokens."""
    sequences: float
    """Rows with at least one trainable token."""


def count_normalizers(mask: Tensor, *, reduce: Callable[[Tensor], Tensor] | None = None) -> LossNormalizers:
    """Return the counts of `mask` [B, T] bool, summed over ranks by `reduce` (one call; None = this rank is all).

    Runs once per optimizer step, after every filter and before the step is cut into micro-batches.
    """
    require_bool(mask=mask)
    trainable = _rows(mask)
    counts = trainable.sum(), trainable.any(dim=1).sum()
    tokens, sequences = map(float, counts) if reduce is None else reduce(torch.stack(counts).double()).tolist()
    return LossNormalizers(tokens=tokens, sequences=sequences)


def aggregate(
    values: Tensor,
    mask: Tensor,
    *,
    mode: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Return the part of a step's loss that this batch contributes, from per-token `values` [B, T].

    The result is 0-d and attached to the graph.

    The parts of all micro-batches and ranks are summed. `normalizers` are the counts of the whole step; None counts the given mask.
    `max_tokens` (the configured response length) is needed by `seq-mean-token-sum-norm` only. A batch without a trainable token gives 0
    with zero gradients. Raises TypeError for half-precision values, ValueError for an unknown mode or a missing `max_tokens`.
    """
    _check(values, mask, mode, max_tokens)
    trainable = _rows(mask)
    masked = zero_outside(trainable, _rows(values))
    if mode == "seq-mean-token-mean":
        row_tokens = trainable.sum(dim=1).clamp(min=1)
        total = (masked.sum(dim=1, dtype=torch.float64) / row_tokens).sum()
    else:
        total = masked.sum(dtype=torch.float64)
    return (total / _divisor(trainable, mode, normalizers, max_tokens)).to(values.dtype)


def _check(values: Tensor, mask: Tensor, mode: str, max_tokens: int | None) -> None:
    require_bool(mask=mask)
    require_same_shape(values=values, mask=mask)
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"values must be float32 or float64, got {values.dtype}; convert it with .float()")
    require_choice("aggregation mode", mode, AGGREGATIONS)
    if mode == "seq-mean-token-sum-norm" and (max_tokens is None or max_tokens <= 0):
        raise ValueError(
            f"max_tokens must be a positive count for seq-mean-token-sum-norm, got {max_tokens}; "
            "pass the configured response limit"
        )


def _divisor(
    trainable: Tensor, mode: str, normalizers: LossNormalizers | None, max_tokens: int | None
) -> Tensor | float:
    """Return what the sum is divided by; a count of 0 divides by 1."""
    if mode == "token-mean":
        return trainable.sum().clamp(min=1) if normalizers is None else normalizers.tokens or 1.0
    scale = float(max_tokens or 1) if mode == "seq-mean-token-sum-norm" else 1.0
    if normalizers is None:
        return trainable.any(dim=1).sum().clamp(min=1) * scale
    return (normalizers.sequences or 1.0) * scale


def _rows(tensor: Tensor) -> Tensor:
    """Return `tensor` as [B, rest]; a [B] tensor holds one entry per row."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(-1)
