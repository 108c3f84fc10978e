"""`AdapterTensors`: the adapter (LoRA) of a version as SGLang takes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import InfrastructureError
from rl_core.api.lora import LoraSpec
from rl_core.rollouts.adapters import Shapes, adapter_shapes

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses into one."""
ALIGNMENT = 64
"""A tensor in the memory that worker and engine share begins at a multiple of this, bytes."""


class AdapterTensors:
    """Tensors and configuration of the adapters of one job."""

    def __init__(self, spec: LoraSpec, shapes: Shapes) -> None:
        """Describe the adapters `spec` of a model with the tensors `shapes`."""
        self.shapes = adapter_shapes(spec, shapes)
        """Name -> (shape, dtype) of the tensors that the trainer sends."""
        groups = [group for group in FUSED if not set(group).isdisjoint(spec.targets)]
        fused = {target for group in groups for target in group}
        fused_spec = spec.model_copy(update={"targets": sorted({*spec.targets, *fused})})
        self._fused_shapes = adapter_shapes(fused_spec, shapes)
        """`shapes`, and those of the other parts of fused layers: SGLang needs all parts if one has an adapter."""
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "target_modules": fused_spec.targets,
            "bias": "none",
        }
        """As in `adapter_config.json` of peft."""
        self.nbytes = sum(4 * torch.Size(shape).numel() + ALIGNMENT for shape, _ in self._fused_shapes.values())
        """Size of all tensors in memory where each begins at a multiple of ALIGNMENT."""

    def complete(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `adapters` with zeros for the parts of fused layers that are not trained.

        Raises InfrastructureError unless `adapters` are exactly those of the job.
        """
        mismatched = sorted(self.shapes.keys() ^ adapters.keys()) or [
            name for name, (shape, _) in self.shapes.items() if tuple(adapters[name].shape) != shape
        ]
        if mismatched:
            raise InfrastructureError(
                f"an adapter must have the {len(self.shapes)} tensors of model.lora, got {len(adapters)}; "
                f"{len(mismatched)} are missing, unknown or of another shape: {mismatched[:3]}"
            )
        zeros = ((name, shape) for name, (shape, _) in self._fused_shapes.items() if name not in adapters)
        return {**adapters, **{name: torch.zeros(shape) for name, shape in zeros}}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor in host memory, in hex, as SGLang computes it for adapters."""
    return hashlib.sha256(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())).hexdigest()
