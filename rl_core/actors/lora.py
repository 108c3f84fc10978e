"""Low-rank adapters (LoRA) on the linear layers of a causal LM: W x + b + alpha / rank B A dropout(x), with W and b frozen.

An adapter is two linear layers without bias below the layer that it belongs to, `lora_A` [rank, inputs] and `lora_B` [outputs, rank], named
as in `peft`. All other parameters keep the names that they have in the model folder. An adapter starts with B = 0, so that the model starts
as its base. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import linear

from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice, Slices
from rl_core.api.errors import ConfigError, DataError
from rl_core.api.lora import LoraSpec
from rl_core.weights.manifest import is_adapter_name

A, B, DROPOUT = "lora_A", "lora_B", "lora_dropout"
"""Names of the parts of an adapter below its layer."""
FOLDER = "adapter"
"""Folder of the adapters in an exported model."""
_LAYER = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)*(\w+)$")
"""Number of the decoder layer and own name of a module inside it."""
MERGED_TYPES = (torch.float32, torch.float64)
"""Types in which a layer computes with its merged weight."""


def attach_adapters(model: nn.Module, spec: LoraSpec) -> None:
    """Add adapters to the layers that `spec` selects, in place. Values are not set.

    Must be called before the model is wrapped. Raises ConfigError when a target is none of the model's linear layers.
    """
    adapted = set()
    for name, module in list(model.named_modules()):
        match = _LAYER.search(name)
        is_target = match and match[2] in spec.targets and (spec.layers is None or int(match[1]) in spec.layers)
        if match and is_target and isinstance(module, nn.Linear):
            _attach(module, spec)
            adapted.add(match[2])
    if absent_targets := sorted(set(spec.targets) - adapted):
        raise ConfigError(f"model.lora.targets must be linear layers of the model, got {absent_targets}; remove them")


def _attach(layer: nn.Linear, spec: LoraSpec) -> None:
    options: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.add_module(A, nn.Linear(layer.in_features, spec.rank, **options))
    layer.add_module(B, nn.Linear(spec.rank, layer.out_features, **options))
    if spec.dropout:
        layer.add_module(DROPOUT, nn.Dropout(spec.dropout))
    layer.__class__ = AdaptedLinear
    layer.lora_scale, layer.lora_enabled = spec.scale, True


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left transposed x right."""
    return left.t() @ right


class AdaptedLinear(nn.Linear):  # type: ignore[misc]
    """`nn.Linear` with an adapter; its weight and bias are frozen.

    In float32 and float64 the output is one product with the merged weight W + alpha / rank B A, and there is no product for a gradient of
    W. In half precision the merged weight would lose small adapters, and dropout concerns the adapter's input alone: there B A x is
    computed beside W x.
    """

    products: Any = (linear, _transposed_product)
    """left x right transposed + bias, and left transposed x right, in float32; those of this machine's processor where it has faster ones."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output [..., outputs] for `input` [..., inputs]."""
        has_dropout = DROPOUT in self._modules and self.lora_dropout.training
        if input.dtype not in MERGED_TYPES or not input.numel():
            output = super().forward(input)
        elif self.lora_enabled and not has_dropout:
            return self._product(input, self.lora_A.weight, self.lora_B.weight)
        else:
            output = self._product(input, None, None)
        if self.lora_enabled:
            hidden = self.lora_dropout(input) if has_dropout else input
            output = output + self.lora_B(self.lora_A(hidden)) * self.lora_scale
        return output

    def _product(self, input: Tensor, down: Tensor | None, up: Tensor | None) -> Tensor:
        products = self.products if input.dtype == torch.float32 else AdaptedLinear.products
        output: Tensor = _MergedLinear.apply(input, self.weight, self.bias, down, up, self.lora_scale, products)
        return output


class _MergedLinear(torch.autograd.Function):  # type: ignore[misc]
    """x (W + scale B A) transposed + bias, or without A and B x W transposed + bias. W and bias get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
        products: Any,
    ) -> Tensor:
        wants_inputs, _, _, wants_down, wants_up, *_ = ctx.needs_input_grad
        # The merged weight is computed again in the backward pass. Keeping it would need a second copy of the model.
        ctx.save_for_backward(inputs if wants_down or wants_up else None, weight if wants_inputs else None, down, up)
        ctx.inputs_shape, ctx.scale, ctx.products = inputs.shape, scale, products
        product, _ = products
        return product(inputs, _merged(weight, down, up, scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, down, up = ctx.saved_tensors
        wants_inputs, _, _, wants_down, wants_up, *_ = ctx.needs_input_grad
        product, transposed_product = ctx.products
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_inputs = grad_down = grad_up = None
        if wants_inputs:
            grad_inputs = product(rows, _merged(weight, down, up, ctx.scale).t()).view(ctx.inputs_shape)
        if wants_down:
            grad_down = transposed_product(product(rows, up.t()), inputs.reshape(-1, inputs.shape[-1])) * ctx.scale
        if wants_up:
            grad_up = transposed_product(rows, product(inputs.reshape(-1, inputs.shape[-1]), down)) * ctx.scale
        return grad_inputs, None, None, grad_down, grad_up, None, None


def _merged(weight: Tensor, down: Tensor | None, up: Tensor | None, scale: float) -> Tensor:
    if down is None or up is None:
        return weight
    # This is a batched product, because selective checkpointing counts plain products and must count one for each layer.
    return torch.baddbmm(weight[None], up[None], down[None], alpha=scale)[0]


def initialize(slices: Slices, seed: int) -> None:
    """Fill the adapters in `slices`, the parts that this rank stores, with their initial values. Other tensors are left as they are.

    A (rank x inputs) is uniform between -1/sqrt(inputs) and 1/sqrt(inputs), and B (outputs x rank) is zero. The values depend only on `seed`
    and on name and shape of the whole parameter, so that they are equal in every parallel layout.
    """
    for name, parts in slices.items():
        if is_adapter_name(name):
            shape = parts[0].shape
            values = torch.zeros(shape)
            if A in name.split("."):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                values.uniform_(-1.0, 1.0, generator=generator).div_(shape[1] ** 0.5)
            for box in (box for part in parts for box in part.boxes()):
                box.tensor.copy_(values[box.box])


def whole_adapters(shapes: Mapping[str, Sequence[int]], slices: Slices, ranks: Ranks) -> dict[str, Tensor]:
    """Return each adapter in `shapes` as a whole float32 tensor on every rank. Collective.

    Each element must be in the `slices` of exactly one rank. This is not checked: elements of several ranks are added up, missing ones are 0.
    """
    flat = torch.zeros(sum(map(math.prod, shapes.values())), device=ranks.device)
    views = _split_by_shape(flat, shapes)
    for name in shapes.keys() & slices.keys():
        for box in (box for part in slices[name] for box in part.boxes()):
            views[name][box.box] = box.tensor
    return _split_by_shape(ranks.sum(flat), shapes)


def _split_by_shape(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(*shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class DisabledAdapters:
    """The reference policy of a model with adapters: the model without them. It holds no weights."""

    def __init__(self, model: nn.Module) -> None:
        """`model` has adapters; it may be wrapped."""
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_enabled")]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Disable the adapters inside the block."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for layer in self._layers:
            layer.lora_enabled = enabled


class MergedSlices(Mapping[str, Sequence[LocalSlice]]):
    """The parts that a rank stores of the merged weights W + alpha / rank B A, by Hugging Face name.

    Each is computed when it is asked for, in float32, so that there is never a second copy of the model. The operations are those of
    `peft`'s merge in the same order, so that both merge to the same weights: another order moves logits by more than 1e-5.
    """

    def __init__(self, slices: Slices, adapters: Mapping[str, Tensor], scale: float) -> None:
        """Merge `slices`, the rank's parts of the model, with `adapters`, whole tensors by name. `scale` is alpha / rank."""
        self._slices, self._adapters, self._scale = slices, adapters, scale

    def __getitem__(self, name: str) -> Sequence[LocalSlice]:
        """Return the parts of the merged tensor `name`; the stored parts themselves where the layer has no adapter."""
        parts, layer = self._slices[name], name.removesuffix(".weight")
        if f"{layer}.{A}.weight" not in self._adapters:
            return parts
        down, up = self._adapters[f"{layer}.{A}.weight"], self._adapters[f"{layer}.{B}.weight"]
        merged = [replace(part, tensor=part.tensor.detach().to(torch.float32, copy=True)) for part in parts]
        for box in (box for part in merged for box in part.boxes()):
            rows, columns = box.box
            box.tensor.add_((up[rows] @ down[:, columns]) * self._scale)
        return merged

    def __contains__(self, name: object) -> bool:
        """Return whether this rank stores parts of the tensor `name`."""
        return name in self._slices

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (name for name in self._slices if not is_adapter_name(name))

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(1 for _ in self)


def folder_files(adapters: Mapping[str, Tensor], spec: LoraSpec, *, base: str) -> dict[str, bytes]:
    """Return the files of a folder that `peft` loads, by path: the configuration and `adapters`, whole tensors by name.

    `base` is the folder of the weights below them.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(set(spec.targets)),
        "layers_to_transform": spec.layers,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {
        f"base_model.model.{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in adapters.items()
    }
    return {
        f"{FOLDER}/adapter_config.json": json.dumps(config, indent=2).encode(),
        f"{FOLDER}/adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }


def identity(spec: LoraSpec, *, base: str) -> dict[str, Any]:
    """Return the settings of adapters and `base`, the digest of the weights below them. Both must match for adapters to be loaded."""
    return {**spec.model_dump(mode="json", exclude={"dropout"}), "base": base}


def check_same_adapters(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None, *, base: str) -> None:
    """Raise DataError unless the adapter settings and the base of a checkpoint, `saved`, equal those of this run, `own`.

    None stands for a model without adapters. `base` is the folder of the weights below the adapters.
    """
    if own is None or saved is None:
        if own is not saved:
            wanted, got = ("all weights", "adapters only") if own is None else ("adapters only", "all weights")
            raise DataError(
                f"the checkpoint must hold {wanted} for this model.lora, got {got}; write the model.lora with which it was saved"
            )
        return
    differ = [name for name in own if own[name] != saved.get(name)]
    if "base" in differ:
        raise DataError(
            f"the weights in {base} must be those on which the checkpoint's adapters were trained, got others; "
            "give the model.path of that run"
        )
    if differ:
        raise DataError(
            f"model.lora must be that of the checkpoint, got other values of {', '.join(differ)}: "
            f"{[saved.get(name) for name in differ]} are saved; write these"
        )
