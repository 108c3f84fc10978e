"""Sets what a mask leaves out to zero."""

import torch
from torch import Tensor


def is_all_true(mask: Tensor) -> bool:
    """Return True if `mask` is on a CPU and has no false entry. On another device return False: to read it would wait for the device."""
    return mask.is_cpu and bool(mask.all())


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `mask` is true and 0 elsewhere, even where a value there is NaN. Gradients flow through the values that are kept.

    `mask` is bool and broadcasts to the shape of `values`, which are floating-point. The result is `values` itself if `is_all_true(mask)`, so
    it must not be changed in place. This saves an operation, whose fixed cost matters for the small batches of policies in simulators.
    """
    return values if is_all_true(mask) else torch.where(mask, values, 0)
