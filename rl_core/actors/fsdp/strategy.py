"""How FSDP2 holds a model: wrap, gradient sync, clipping. The manager asks for nothing else, so other wrappers can stand here.

One rank in float32 has nothing to shard, to gather or to cast: its model stays a plain module with the same names, and
checkpoints of both kinds load into each other.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rl_core.actors.hf import decoder_layer_classes
from rl_core.actors.shards import local_tensor


class Strategy(Protocol):
    """What the manager needs of a wrapper; implemented by FSDP2Strategy."""

    def wrap(self, model: nn.Module, *, methods: Sequence[str] = ()) -> nn.Module:
        """Shard `model` in place; `methods` run the wrapper's hooks as `forward` does."""

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch's forward and backward."""

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return this rank's sum of squared gradients, float64 0-d."""

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by `factor`."""


class FSDP2Strategy:
    """`fully_shard` per decoder layer and for the rest, reduced in float32."""

    def __init__(self, mesh: DeviceMesh, *, compute_dtype: torch.dtype, accumulate_without_sync: bool = True) -> None:
        self._mesh = mesh
        self._compute_dtype = compute_dtype
        self._accumulate = accumulate_without_sync

    @property
    def shards(self) -> bool:
        """Return whether models are wrapped at all."""
        return bool(self._mesh.size() > 1 or self._compute_dtype != torch.float32)

    def wrap(self, model: nn.Module, *, methods: Sequence[str] = ()) -> nn.Module:
        """Shard decoder layers first, then what is left with the root; parameters become DTensors over `dp`."""
        if not self.shards:
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._compute_dtype == torch.float32 else self._compute_dtype,
            reduce_dtype=torch.float32,
        )
        layers = decoder_layer_classes(model)
        for module in model.modules():
            if isinstance(module, layers):
                fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
        # The root is resharded too: weights swapped between passes must not survive as a gathered copy.
        fully_shard(model, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
        for method in methods:
            register_fsdp_forward_method(model, method)
        return model

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients with the last micro-batch only, or with each (less memory, same result)."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last or not self._accumulate)
        return nullcontext()

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return this rank's sum of squared gradients, float64 0-d."""
        grads = _local_grads(parameters)
        if not grads:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by `factor`."""
        torch._foreach_mul_(_local_grads(parameters), factor)


def _local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    return [grad for grad in grads if grad.numel()]
