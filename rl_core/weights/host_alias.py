"""A CPU tensor's memory for who needs its bytes."""

import ctypes

import torch
from torch import Tensor


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
