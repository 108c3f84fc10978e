"""Rotary position embedding as one complex product.

The two numbers of a rotated pair are stored side by side (interleaved), not in two halves as in the layout of Hugging Face. So a head of `d`
numbers is `d/2` complex numbers, and rotating is one multiplication in place. Query and key are permuted in the same way, which does not change
their dot products. `interleave` permutes the projection weights when they are loaded. The attention scale 1/sqrt(d) is applied here too, as
its square root on both query and key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.rollouts.hf.config import DecoderConfig


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Return [d/2] float32. Sources: RoFormer (2021); Llama 3.1's scaling as in its reference code."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return inverse / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(inverse, scaling)
    return inverse


def _llama3(inverse: Tensor, scaling: object) -> Tensor:
    """Return frequencies slowed by `factor` for long wavelengths, smoothly joined to the short ones."""
    parameters = dict(scaling)  # type: ignore[call-overload]
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    slowed = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, slowed)


def rotation_table(config: DecoderConfig, positions: int, device: torch.device) -> Tensor:
    """Return [positions, 1, d/2] complex64: exp(i * position * frequency) * d**-0.25, where d is the head size."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(config))
    table = torch.polar(torch.full_like(angles, config.head_dim**-0.25), angles)
    return table.unsqueeze(1).to(device)


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows [heads * d, ...] with the two halves of every head side by side."""
    trailing = weight.shape[1:]
    return weight.reshape(-1, 2, head_dim // 2, *trailing).transpose(1, 2).reshape(weight.shape)


def deinterleave(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows [heads * d, ...] in Hugging Face's layout again."""
    trailing = weight.shape[1:]
    return weight.reshape(-1, head_dim // 2, 2, *trailing).transpose(1, 2).reshape(weight.shape)
