"""Sets what a mask leaves out to zero."""

import torch
from torch import Tensor


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `mask`, and 0 elsewhere, also in place of NaN; gradients flow through the values that are kept.

    `mask` is bool and broadcasts to `values`. On a CPU the result is `values` itself if the mask is true everywhere: with small batches, as
    those of policies in simulators, each operation costs as much as its numbers.
    """
    if mask.is_cpu and mask.all():
        return values
    return torch.where(mask, values, 0)
