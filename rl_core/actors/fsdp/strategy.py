"""How FSDP wraps a model: sharding, gradient synchronization and clipping, and which part of each tensor a rank stores.

Everything in this folder that depends on how the wrapper shards tensors asks the strategy; no other file knows about DTensors or flat
parameters. One rank in float32 needs no wrapper: its model stays a plain module with the same names, and checkpoints of both kinds can be
loaded into each other.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.actors import hf
from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice


class Strategy(ABC):
    """How a model is wrapped, and which part of each tensor a rank stores. Subclasses implement FSDP1 and FSDP2.

    Each decoder layer is one FSDP unit and the rest of the model another. Each unit is sharded over the ranks that share a copy of the
    model. Gradients are reduced in float32.
    """

    def __init__(
        self, ranks: Ranks, *, compute_dtype: torch.dtype, accumulate_without_sync: bool = False, replicas: int = 1
    ) -> None:
        """Wrap models for this rank of `ranks`.

        - `compute_dtype`: type of the forward and backward pass.
        - `accumulate_without_sync`: reduce gradients with the last micro-batch only.
        - `replicas`: number of copies of the model (hybrid sharding); consecutive ranks share a copy.
        """
        self._ranks = ranks
        self._compute_dtype = compute_dtype
        self._accumulate = accumulate_without_sync
        self._replicas = replicas

    allows_several_types = False
    """Whether the parameters of an FSDP unit may be stored in several dtypes. The trained ones must have the same dtype."""

    # Wrapping and gradients -----------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether models are wrapped at all."""
        return self._ranks.size > 1 or self._half

    @property
    def _half(self) -> bool:
        return bool(self._compute_dtype != torch.float32)

    @property
    def copy_size(self) -> int:
        """Number of ranks that share a copy of the model. The first ranks hold the first copy."""
        return self._ranks.size // self._replicas

    def wrap(
        self, model: nn.Module, *, device: torch.device, aliases: Mapping[str, str], methods: Sequence[str] = ()
    ) -> nn.Module:
        """Return `model` wrapped and with storage on `device`.

        `aliases` maps the name of each tied parameter to that of the parameter it is tied to. Calls of the methods named in `methods` run
        the wrapper's hooks as `forward` does. Parameters that were on the meta device have no values afterwards.
        """
        if self.is_sharded:
            return self._wrap(model, device, aliases, methods)
        return _place(model, device, aliases)

    @abstractmethod
    def _wrap(
        self, model: nn.Module, device: torch.device, aliases: Mapping[str, str], methods: Sequence[str]
    ) -> nn.Module: ...

    @property
    def _mesh(self) -> DeviceMesh:
        return self._ranks.mesh if self._replicas == 1 else self._ranks.hybrid_mesh(self._replicas)

    @abstractmethod
    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context manager of one micro-batch. Gradients are reduced with the last micro-batch only, or with each."""

    def follow_requires_grad(self, model: nn.Module) -> None:  # noqa: B027  only FSDP2 remembers what is trained
        """Update the wrapper after `requires_grad` of parameters has changed. Does nothing by default."""

    def local_squared_grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return this rank's part of the squared gradient norm, a float64 scalar.

        The sum over all ranks is the square of the norm.
        """
        grads = self._grads(parameters)
        if not grads:
            return torch.zeros((), dtype=torch.float64)
        total = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        return total if self._replicas == 1 else total / self._replicas

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by `factor`."""
        if grads := self._grads(parameters):  # a rank may have none: the head of a critic in warm-up has one row
            torch._foreach_mul_(grads, factor)

    @abstractmethod
    def drop_grads(self, model: nn.Module) -> None:
        """Discard the gradients that the wrapper stores beside those of the parameters."""

    def _grads(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        grads = [self.local(p.grad) for p in parameters if p.grad is not None]
        return [grad for grad in grads if grad.numel()]

    # What a rank stores ---------------------------------------------------------------------------------------------

    def named_slices(self, model: nn.Module) -> dict[str, LocalSlice]:
        """Return the part that this rank stores of each parameter and persistent buffer, by its name before wrapping."""
        return {name: self.slice_of(tensor) for name, tensor in hf.named_tensors(model).items()}

    @abstractmethod
    def slice_of(self, tensor: Tensor, like: Tensor | None = None) -> LocalSlice:
        """Return the part of a parameter or buffer that this rank stores, sharing memory.

        With `like`, `tensor` is sharded in the same way as the parameter `like`, for example as its moment.
        """

    @abstractmethod
    def dims(self, parameter: nn.Parameter) -> int:
        """Return the number of dimensions of the whole parameter."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the elements of `tensor` that this rank stores, sharing memory."""
        return tensor

    @abstractmethod
    def shard(self, tensor: Tensor) -> Tensor:
        """Return the tensor that `get_model_state_dict` gives for a parameter or buffer when it does not gather, sharing memory."""


class FSDP2Strategy(Strategy):
    """FSDP2 (`fully_shard`): each parameter is sharded along dimension 0."""

    allows_several_types = True

    def _wrap(
        self, model: nn.Module, device: torch.device, aliases: Mapping[str, str], methods: Sequence[str]
    ) -> nn.Module:
        policy = MixedPrecisionPolicy(
            param_dtype=self._compute_dtype if self._half else None, reduce_dtype=torch.float32
        )
        mesh, layers = self._mesh, hf.decoder_layer_classes(model)
        for module in model.modules():
            if isinstance(module, layers):
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # The root is resharded too: weights swapped between passes must not survive as a gathered copy.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for method in methods:
            register_fsdp_forward_method(model, method)
        return _place(model, device, aliases)

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Set whether this micro-batch reduces gradients, on the model itself; the returned context manager does nothing."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last or not self._accumulate)
        return nullcontext()

    def follow_requires_grad(self, model: nn.Module) -> None:
        """Set the dtypes in which FSDP2 reduces gradients. Does nothing before the first forward pass.

        FSDP2 chooses them at the first forward pass, from the parameters that are trained then. A unit without trained parameters would
        later reduce in half precision.
        """
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group in (group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups):
            if group._reset_sharded_params:  # there was a first pass
                group._init_mp_dtypes()

    def drop_grads(self, model: nn.Module) -> None:
        """Do nothing: FSDP2 stores reduced gradients only at the parameters."""

    def slice_of(self, tensor: Tensor, like: Tensor | None = None) -> LocalSlice:
        """Return the part of a parameter, buffer, gradient or moment that this rank stores, sharing memory. `like` is not used."""
        if not isinstance(tensor, DTensor):
            return LocalSlice.of_whole(tensor)
        with torch.no_grad():  # a DTensor's own detach takes longer than all the rest
            local = tensor.to_local().detach()
        offset = _offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return LocalSlice(tensor=local, shape=tuple(tensor.shape), offset=offset, replicated=False)

    def dims(self, parameter: nn.Parameter) -> int:
        """Return the number of dimensions of the whole parameter."""
        return int(parameter.dim())

    def local(self, tensor: Tensor) -> Tensor:
        """Return the elements of `tensor` that this rank stores, sharing memory."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def shard(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a DTensor."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            return tensor
        placements = [Replicate()] * (self._replicas > 1) + [Shard(0)]
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False)


@functools.lru_cache(maxsize=4096)
def _offset(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the index of this rank's first element of a tensor of that shape."""
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


class _FlatRange(NamedTuple):
    """The part of a parameter that a rank stores inside a flat parameter."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """Row-major index of the first element that the rank stores."""


class FSDP1Strategy(Strategy):
    """`FullyShardedDataParallel`: the parameters of a unit are concatenated into a flat one, which is sharded into equal ranges.

    The model's parameters are views [elements] of this rank's range. A parameter that other ranks store is empty.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `Strategy`."""
        super().__init__(*args, **kwargs)
        self._places: dict[Tensor, _FlatRange] = {}

    def _wrap(
        self, model: nn.Module, device: torch.device, aliases: Mapping[str, str], methods: Sequence[str]
    ) -> nn.Module:
        layers, on_meta = hf.decoder_layer_classes(model), _on_meta(model)
        # A layer gets storage right before it is sharded, so that a rank never holds more than one whole layer.
        for name, module in list(model.named_modules()):
            if isinstance(module, layers):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, self._unit(_placed(module, device), device))
        units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
        wrapped = {module for unit in units for module in unit.modules()}
        for module in model.modules():
            if module not in wrapped:
                _placed(module, device, recurse=False)
        if on_meta:
            hf.retie(model, aliases)
        root = self._unit(model, device)
        for method in methods:
            setattr(root, method, MethodType(_forwarding(method), root))
        for handle in _handles(root):
            flat = handle.flat_param
            for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                self._places[parameter] = _FlatRange(tuple(shape), info.intra_param_start_idx or 0)
        return root

    def _unit(self, module: nn.Module, device: torch.device) -> nn.Module:
        sharding = ShardingStrategy.FULL_SHARD if self._replicas == 1 else ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            module,
            device_mesh=self._mesh,
            # A single rank has nothing to shard. FSDP1 warns about every other strategy.
            sharding_strategy=ShardingStrategy.NO_SHARD if self._ranks.size == 1 else sharding,
            mixed_precision=MixedPrecision(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
            if self._half
            else None,
            use_orig_params=True,
            device_id=device,
        )

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context manager of one micro-batch: `no_sync` before the last one.

        In half precision gradients are reduced with each micro-batch, because FSDP1 would otherwise accumulate them in half precision.
        """
        if isinstance(model, FullyShardedDataParallel) and self._accumulate and not is_last and not self._half:
            no_sync: AbstractContextManager[None] = model.no_sync()
            return no_sync
        return nullcontext()

    def drop_grads(self, model: nn.Module) -> None:
        """Discard the gradients of flat parameters, which FSDP1 would keep until the next pass."""
        for handle in _handles(model):
            handle.flat_param.grad = None

    def slice_of(self, tensor: Tensor, like: Tensor | None = None) -> LocalSlice:
        """Return what this rank stores of a parameter or buffer, or of a tensor cut as the parameter `like`, sharing memory."""
        place = self._places.get(tensor if like is None else like)
        if place is None or self._ranks.size == 1:
            return LocalSlice.of_whole(tensor)
        return LocalSlice.of_range(tensor.detach(), *place)

    def dims(self, parameter: nn.Parameter) -> int:
        """Return the number of dimensions of the whole parameter."""
        return len(self._places[parameter].shape if parameter in self._places else parameter.shape)

    def shard(self, tensor: Tensor) -> Tensor:
        """Return this rank's range of the flat parameter."""
        return tensor.detach()


def _handles(model: nn.Module) -> list[Any]:
    """Return the holders of the flat parameters of a model under FSDP1."""
    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    return [unit._handle for unit in units if unit._handle is not None]


def _forwarding(method: str) -> Any:
    """Return a method for a model wrapped by FSDP1 that runs `method` of the wrapped model with FSDP's hooks, which are on `forward` only."""

    def run(root: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> Any:
        root.module.forward = getattr(root.module, method)
        try:
            return root(*args, **kwargs)
        finally:
            del root.module.forward
            if not torch.is_grad_enabled():
                # FSDP1 keeps the root's gathered weights for a backward pass: swapped or offloaded weights must not survive in them.
                for handle in _handles(root):
                    if handle.uses_sharded_strategy:
                        handle._free_unsharded_flat_param()

    return run


def _place(model: nn.Module, device: torch.device, aliases: Mapping[str, str]) -> nn.Module:
    """Return `model`, wrapped or not, with storage on `device`."""
    if _on_meta(model):
        hf.materialize(model, device, aliases)
    return model.to(device)


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _placed(module: nn.Module, device: torch.device, *, recurse: bool = True) -> nn.Module:
    """Return a module whose tensors have storage on `device`. Existing values are kept."""
    module._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device), recurse=recurse
    )
    return module
