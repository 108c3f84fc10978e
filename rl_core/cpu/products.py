"""Matrix products of the generating forward, by whichever library of torch is faster on this machine (`machine`).

oneDNN costs 10 us per call and, for each new shape, half a millisecond and half a megabyte of generated code. So only larger
products go there (benchmarks/hf_engine.py), and the number of rows, which changes from step to step, is padded to few sizes
(`padded_rows`). Both libraries compute in float32 and differ by rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from rl_core.cpu.machine import prefers_onednn

ONEDNN_FROM = 1_500_000
"""Multiplications of a product from which oneDNN's cost per call is regained."""


def pads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether rows should be padded: where products may go to oneDNN."""
    return dtype == torch.float32 and device.type == "cpu" and prefers_onednn()


def padded_rows(rows: int) -> int:
    """Return the next of the sizes with four steps per doubling, from 8 on: 8, 16, 24, 32, 40, 48, 56, 64, 80, ..."""
    step = max(8, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [N, in] @ weight [out, in].T + bias."""
    if _uses_onednn(x, weight):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def add_linear(hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [N, out] + x [N, in] @ weight [out, in].T."""
    if _uses_onednn(x, weight):
        return _onednn(x, weight, None).add_(hidden)
    return torch.addmm(hidden, x, weight.t())


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] * weight.numel() >= ONEDNN_FROM and pads(x.dtype, x.device)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
