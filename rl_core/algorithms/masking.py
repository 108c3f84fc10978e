"""Sets what a mask leaves out to zero."""

import torch
from torch import Tensor


def is_all_true(mask: Tensor) -> bool:
    """Return whether `mask` is true everywhere, if it is on a CPU. Returns False for a mask on another device, without waiting for it."""
    return mask.is_cpu and bool(mask.all())


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `mask`, and 0 elsewhere, also in place of NaN; gradients flow through the values that are kept.

    `mask` is bool and broadcasts to `values`. If `is_all_true(mask)`, the result is `values` itself: with small batches, as those of
    policies in simulators, each operation costs as much as its numbers.
    """
    return values if is_all_true(mask) else torch.where(mask, values, 0)
