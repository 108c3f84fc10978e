"""Adapters (LoRA) in an engine: which tensors they are, and `AdapterMerge`, which merges them into the weights of the HF engine.

The merge keeps the base of every layer with an adapter, because a merged weight cannot be turned back exactly. The receiver writes base and
adapters here and verifies them here; then the engine is given W + alpha / rank B A, computed in float32 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rl_core.api.lora import LoraSpec

_WEIGHT = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)*(\w+)\.weight$")
"""Number of the decoder layer and own name of the module of a weight."""
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, dtype such as "float32")."""


class AdapterMerge:
    """Base and adapters of the adapted layers of one engine."""

    def __init__(self, spec: LoraSpec, shapes: Shapes, *, device: str = "cpu") -> None:
        """Reserve memory on `device` for the adapters `spec` of a model with the tensors `shapes`."""
        self._scale = spec.scale
        self.base: dict[str, Tensor] = {}
        """Weights of the layers with adapters, by Hugging Face name."""
        self.adapters: dict[str, Tensor] = {}
        """`lora_A` [rank, inputs] and `lora_B` [outputs, rank] of each, float32, by the trainer's name."""
        for name in adapted_weights(spec, shapes):
            shape, dtype = shapes[name]
            self.base[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, _) in adapter_shapes(spec, shapes).items():
            self.adapters[name] = torch.zeros(shape, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return base and adapters by name, to be written in place."""
        return {**self.base, **self.adapters}

    def merged(self, given: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Take the tensors that are kept here out of `given`; yield the others, and at its end each merged weight."""
        parameters = self.tensors()
        for name, tensor in given:
            if name in parameters:
                parameters[name].copy_(tensor)
            else:
                yield name, tensor
        for name, base in self.base.items():
            down, up = (self.adapters[part] for part in _names(name))
            yield name, torch.addmm(base.float(), up, down, alpha=self._scale).to(base.dtype)


def adapted_weights(spec: LoraSpec, shapes: Shapes) -> list[str]:
    """Return the names of the weights that `spec` gives an adapter, out of those of a model with the tensors `shapes`."""
    names = []
    for name in shapes:
        match = _WEIGHT.search(name)
        if match and match[2] in spec.targets and (spec.layers is None or int(match[1]) in spec.layers):
            names.append(name)
    return names


def adapter_shapes(spec: LoraSpec, shapes: Shapes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of the adapters `spec` of a model with the tensors `shapes`, by the trainer's names.

    `lora_A` is [rank, inputs] and `lora_B` is [outputs, rank], both float32.
    """
    shapes_of_parts: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in adapted_weights(spec, shapes):
        outputs, inputs = shapes[name][0]
        down, up = _names(name)
        shapes_of_parts[down] = ((spec.rank, inputs), "float32")
        shapes_of_parts[up] = ((outputs, spec.rank), "float32")
    return shapes_of_parts


def _names(weight: str) -> tuple[str, str]:
    """Return the names of A and B of the layer with that weight."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
