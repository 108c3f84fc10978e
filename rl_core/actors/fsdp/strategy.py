"""How FSDP2 holds a model: wrapping, gradient sync and clipping, and what a rank stores of each tensor.

Everything in this folder that depends on how the wrapper cuts tensors asks the strategy; no other file knows DTensors.
One rank in float32 has nothing to shard, to gather or to cast: its model stays a plain module with the same names, and
checkpoints of both kinds load into each other.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.actors.hf import decoder_layer_classes, stored_tensors
from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice


class FSDP2Strategy:
    """`fully_shard` per decoder layer and for the rest, reduced in float32; dimension 0 is cut over the data ranks."""

    def __init__(self, ranks: Ranks, *, compute_dtype: torch.dtype, accumulate_without_sync: bool = True) -> None:
        self._ranks = ranks
        self._compute_dtype = compute_dtype
        self._accumulate = accumulate_without_sync

    # Wrapping and gradients -----------------------------------------------------------------------------------------

    @property
    def shards(self) -> bool:
        """Return whether models are wrapped at all."""
        return self._ranks.size > 1 or self._compute_dtype != torch.float32

    def wrap(self, model: nn.Module, *, methods: Sequence[str] = ()) -> nn.Module:
        """Shard `model` in place, decoder layers first, then what is left with the root; `methods` run its hooks as `forward` does."""
        if not self.shards:
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._compute_dtype == torch.float32 else self._compute_dtype,
            reduce_dtype=torch.float32,
        )
        mesh, layers = self._ranks.mesh, decoder_layer_classes(model)
        for module in model.modules():
            if isinstance(module, layers):
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # The root is resharded too: weights swapped between passes must not survive as a gathered copy.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for method in methods:
            register_fsdp_forward_method(model, method)
        return model

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: gradients are reduced with the last only, or with each (less memory, same result)."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last or not self._accumulate)
        return nullcontext()

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return this rank's sum of squared gradients, float64 0-d."""
        grads = self._grads(parameters)
        if not grads:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by `factor`."""
        if grads := self._grads(parameters):  # a rank may have none: the head of a critic in warm-up has one row
            torch._foreach_mul_(grads, factor)

    def _grads(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        grads = [self.local(p.grad) for p in parameters if p.grad is not None]
        return [grad for grad in grads if grad.numel()]

    # What a rank stores ---------------------------------------------------------------------------------------------

    def named_slices(self, model: nn.Module) -> dict[str, LocalSlice]:
        """Return what a folder stores by Hugging Face name, parameters (tied ones once) and persistent buffers, as this rank has it."""
        return {name: self.slice_of(tensor) for name, tensor in stored_tensors(model).items()}

    def slice_of(self, tensor: Tensor) -> LocalSlice:
        """Return what this rank stores of a parameter, buffer, gradient or moment, sharing memory."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return LocalSlice.of_whole(tensor)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return LocalSlice(tensor=tensor.to_local(), shape=tuple(tensor.shape), offset=tuple(offset), replicated=False)

    def local(self, tensor: Tensor) -> Tensor:
        """Return the elements this rank stores of `tensor`, sharing memory."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the full tensor on every rank; collective for a sharded one."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def as_dtensor(self, tensor: Tensor) -> DTensor:
        """Return `tensor` as the DTensor it is, or would be on a mesh of one."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self._ranks.mesh, [Shard(0)], run_check=False)
