"""Matrix products of the forward, by whichever library of torch is faster on this machine.

On CPUs torch sends float32 products to MKL, which runs AMD processors at about half of their speed; oneDNN, which torch
carries too, does not, but costs about 10 us per call. So larger products go to oneDNN (benchmarks/hf_engine.py). Both
compute in float32 and differ by rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

ONEDNN_FROM = 1_500_000
"""Multiplications of a product from which oneDNN's cost per call is regained."""
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [N, in] @ weight [out, in].T + bias."""
    if _worth_onednn(x, weight):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def add_linear(hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [N, out] + x [N, in] @ weight [out, in].T."""
    if _worth_onednn(x, weight):
        return _onednn(x, weight, None).add_(hidden)
    return torch.addmm(hidden, x, weight.t())


def _worth_onednn(x: Tensor, weight: Tensor) -> bool:
    large = x.shape[0] * weight.numel() >= ONEDNN_FROM
    return large and _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
