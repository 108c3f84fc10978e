"""Whole and sharded tensors behind one face: FSDP2 cuts dimension 0 over the data-parallel ranks, plain tensors are whole."""

import ctypes

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` this rank stores, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_range(tensor: Tensor) -> tuple[int, int]:
    """Return [start, stop) of this rank's rows in the full tensor; a scalar has the range (0, 1)."""
    if tensor.dim() == 0:
        return 0, 1
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks hold different parts of `tensor`."""
    return isinstance(tensor, DTensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank; collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def storage_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Return one local tensor per distinct storage, so that views and tied tensors count once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        local = local_tensor(tensor.detach())
        found.setdefault(local.untyped_storage()._cdata, local)
    return list(found.values())


def host_alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the same memory with a storage of its own; others come back as they are.

    `Tensor.numpy()` fixes the size of a storage for good, and a storage of fixed size cannot be offloaded in place. Who
    needs a view as bytes gets this one.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as the alias's storage
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def checksum(tensors: list[Tensor]) -> float:
    """Return a float64 sum over the bits of this rank's parts, for equality checks inside one process."""
    return float(sum(local_tensor(t.detach()).contiguous().view(-1).view(torch.uint8).double().sum() for t in tensors))
