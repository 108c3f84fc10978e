"""Linear layers through oneDNN on CPU: forward and both gradients, float32.

The sums are in another order than in torch's own layers, so results agree to rounding only.

oneDNN generates code for each new shape, about half a megabyte, and torch and oneDNN keep what they made for their last
1,024 shapes. A training batch has another number of tokens at every step, so that would grow to gigabytes without one hit:
the caches are cut to what one micro-batch repeats from layer to layer.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.cpu.machine import has_onednn

CACHED_SHAPES = 32
"""Kept by each cache: a model's linear layers have about 20 shapes in one forward and backward pass."""
CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""The variables that torch and oneDNN read at their first product."""


def _product(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return left x right transposed (+ bias), [M, N]."""
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")


def _transposed_product(left_MN: Tensor, right_MK: Tensor) -> Tensor:
    """Return left transposed x right, [N, K]. The first operand is copied to be contiguous, so the narrower one is passed first."""
    if left_MN.shape[1] <= right_MK.shape[1]:
        return _product(left_MN.t(), right_MK.t())
    return _product(right_MK.t(), left_MN.t()).t()


class _OneDnnLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As in `nn.Linear`, the inputs are saved only if the weight needs a gradient, and the weight only if the inputs need one.
        wants_inputs, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if wants_weight else None, weight if wants_inputs else None)
        ctx.inputs_shape = inputs.shape
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows_MN = grad.reshape(-1, grad.shape[-1]).contiguous()
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        grad_inputs = _product(rows_MN, weight.t()).view(ctx.inputs_shape) if wants_inputs else None
        grad_weight = _transposed_product(rows_MN, inputs.reshape(-1, inputs.shape[-1])) if wants_weight else None
        return grad_inputs, grad_weight, rows_MN.sum(0) if wants_bias else None


class OneDnnLinear(nn.Linear):  # type: ignore[misc]
    """`nn.Linear` whose products run in oneDNN; same parameters and names."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input [..., K] x weight transposed + bias, [..., N]; other types and empty batches as `nn.Linear`."""
        if input.dtype != torch.float32 or input.device.type != "cpu" or input.numel() == 0:
            return super().forward(input)
        return _OneDnnLinear.apply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> int:
    """Turn the model's linear layers into oneDNN ones in place; return how many (0 where this torch has no oneDNN).

    Bounds oneDNN's caches in this process, unless the environment says how large they are to be.
    """
    if not has_onednn():
        return 0
    for variable in CACHES:
        os.environ.setdefault(variable, str(CACHED_SHAPES))
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    for module in model.modules():
        if hasattr(module, "products"):  # a layer that computes its own gradients
            module.products = (_product, _transposed_product)
    return len(layers)
