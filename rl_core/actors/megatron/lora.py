"""Low-rank adapters (LoRA) beside megatron-core's linear layers.

megatron-core has no adapters. One of its linear layers holds one, two or three layers of a Hugging Face model. Each of these that
`LoraSpec` selects gets its own adapter, with the names and shapes of `peft`. If tensor parallelism divides a layer's outputs, each rank has
the whole A and its own rows of B. If it divides the inputs, each rank has its own columns of A and the whole B.

Legend: L tokens, R rank of an adapter, I and O inputs and outputs of a layer on this tensor-parallel rank.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors.critic import SEPARATE
from rl_core.actors.lora import A, B
from rl_core.actors.megatron import library
from rl_core.actors.megatron.convert import ADAPTERS, TensorParallelLayout
from rl_core.api.lora import LoraSpec


@dataclass(frozen=True, slots=True)
class _Fused:
    """Says which Hugging Face layers a linear layer of megatron-core holds, and in which order their outputs follow each other."""

    targets: tuple[str, ...]
    widths: tuple[int, ...]
    """Outputs of each of them in a group."""
    groups: int = 1
    """Number of times that their outputs follow each other on this rank."""
    by_inputs: bool = False
    """Whether the tensor-parallel ranks divide the inputs; otherwise they divide the outputs."""


def attach_adapters(model: Any, spec: LoraSpec, cut: TensorParallelLayout) -> None:
    """Add adapters to the layers that `spec` selects of a pipeline stage, and of a critic's own decoder in it. Values are not set."""
    for decoder in (holder.decoder for holder in (model, getattr(model, SEPARATE, None)) if holder is not None):
        for layer in decoder.layers:
            if spec.layers is None or layer.layer_number - 1 in spec.layers:
                for linear, fused in _linear_layers(layer, cut):
                    if not set(spec.targets).isdisjoint(fused.targets):
                        linear.add_module(ADAPTERS, Adapters(linear, fused, spec, cut.rank))
                        linear.register_forward_hook(_with_adapters)
    if model.config.recompute_granularity is not None and model.pre_process:
        # megatron recomputes a part, and computes its gradients, only if its input requires a gradient.
        model.embedding.register_forward_hook(_require_gradients)


@contextmanager
def dropout_drawn_from(*key: int) -> Iterator[None]:
    """Seed the dropout of adapters inside the block with `key` alone. The tensor-parallel ranks of a stage must pass the same key."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def _linear_layers(layer: Any, cut: TensorParallelLayout) -> list[tuple[Any, _Fused]]:
    attention, mlp = layer.self_attention, layer.mlp
    inner, hidden = mlp.linear_fc1.weight.shape[0] // 2, mlp.linear_fc2.weight.shape[0]
    query_widths = (cut.heads // cut.groups * cut.head, cut.head, cut.head)
    return [
        (
            attention.linear_qkv,
            _Fused(("q_proj", "k_proj", "v_proj"), query_widths, groups=cut.groups // cut.ranks),
        ),
        (attention.linear_proj, _Fused(("o_proj",), (hidden,), by_inputs=True)),
        (mlp.linear_fc1, _Fused(("gate_proj", "up_proj"), (inner, inner))),
        (mlp.linear_fc2, _Fused(("down_proj",), (hidden,), by_inputs=True)),
    ]


def _with_adapters(layer: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    output, bias = outputs
    return getattr(layer, ADAPTERS)(inputs[0], output), bias


def _require_gradients(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


class Adapters(nn.Module):  # type: ignore[misc]
    """The adapters of one of megatron's linear layers: `<target>.lora_A` and `<target>.lora_B` for each target."""

    def __init__(self, layer: Any, fused: _Fused, spec: LoraSpec, tensor_rank: int) -> None:
        """Make the adapters of `spec` for `layer`, which consists of `fused`."""
        super().__init__()
        self._fused, self._scale, self._dropout = fused, spec.scale, spec.dropout
        self._sequence = layer.config.sequence_parallel
        # Ranks with the same inputs draw the same dropout mask.
        self._seed_offset = tensor_rank if fused.by_inputs or self._sequence else 0
        self.lora_enabled = True
        self._places: list[slice] = []
        """Columns of each adapter's outputs in a group of the layer's outputs."""
        weight, start = layer.weight, 0
        options: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        for target, width in zip(fused.targets, fused.widths, strict=True):
            if target in spec.targets:
                down = nn.Linear(weight.shape[1], spec.rank, **options)
                up = nn.Linear(spec.rank, fused.groups * width, **options)
                self.add_module(target, nn.ModuleDict({A: down, B: up}))
                self._places.append(slice(start, start + width))
                if self._sequence:
                    # Each rank has the gradient of a whole matrix for its own tokens only. megatron sums these gradients.
                    (up if fused.by_inputs else down).weight.sequence_parallel = True
            start += width

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return `output` [L, 1, O] of the layer for `inputs` [L, 1, I] with what the adapters add to it.

        Under sequence parallelism a tensor that is whole in its last dimension has only this rank's share of the L tokens.
        """
        if not self.lora_enabled:
            return output
        hidden = torch.cat([adapter[A](self._dropped(inputs)) for adapter in self._modules.values()], dim=-1)
        exchanged = self._exchanged(hidden * self._scale)
        weights = [adapter[B].weight for adapter in self._modules.values()]
        if self._fused.by_inputs:
            return output + exchanged @ weights[0].t()
        return _AddedInPlace.apply(output, exchanged, self._places, self._fused.groups, *weights)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not (self._dropout and self.training):
            return inputs
        # The seed comes from the CPU's generator (see `dropout_drawn_from`), which megatron restores when it recomputes a part.
        seed = int(torch.randint(2**48, ())) + self._seed_offset
        generator = torch.Generator(inputs.device).manual_seed(seed)
        mask = torch.empty(inputs.shape, dtype=torch.bool, device=inputs.device)
        return inputs * mask.bernoulli_(1 - self._dropout, generator=generator) / (1 - self._dropout)

    def _exchanged(self, hidden: Tensor) -> Tensor:
        """Return the outputs of A as this rank's B needs them: of all tokens, summed over the ranks where these divide the inputs."""
        if self._fused.by_inputs:
            summed = (
                library.reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else library.reduce_from_tensor_model_parallel_region
            )
            return summed(hidden)
        if self._sequence:
            return library.gather_from_sequence_parallel_region(hidden)
        return library.copy_to_tensor_model_parallel_region(hidden)


class _AddedInPlace(torch.autograd.Function):  # type: ignore[misc]
    """The output of a layer, to some of whose columns B A x of an adapter is added in place."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, places: list[slice], groups: int, *weights: Tensor) -> Tensor:
        """Return `output` [L, 1, O], which has its columns in `groups` runs of equal length.

        `hidden` [L, 1, n R] are the outputs of A for each of n adapters, and `weights` their B. `places` are the columns of each in a run.
        """
        ctx.save_for_backward(hidden, *weights)
        ctx.places, ctx.groups = places, groups
        runs = output.unflatten(-1, (groups, -1))
        for hidden_part, place, weight in zip(hidden.chunk(len(weights), dim=-1), places, weights, strict=True):
            runs[..., place] += (hidden_part @ weight.t()).unflatten(-1, (groups, -1))
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `output`, `hidden` and `weights`, given the gradient [L, 1, O] of the result."""
        hidden, *weights = ctx.saved_tensors
        runs = grad.unflatten(-1, (ctx.groups, -1))
        hidden_grads, weight_grads = [], []
        for hidden_part, place, weight in zip(hidden.chunk(len(weights), dim=-1), ctx.places, weights, strict=True):
            rows = runs[..., place].reshape(-1, len(weight))
            hidden_grads.append((rows @ weight).view(hidden_part.shape))
            weight_grads.append(rows.t() @ hidden_part.reshape(-1, hidden_part.shape[-1]))
        return grad, torch.cat(hidden_grads, dim=-1), None, None, *weight_grads
