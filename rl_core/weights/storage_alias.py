"""An alias of a CPU tensor whose storage can be viewed as bytes."""

import ctypes

import torch
from torch import Tensor


def storage_alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the same memory with a storage of its own. Other tensors are returned unchanged.

    `Tensor.numpy()` fixes the size of a storage permanently, and a storage of fixed size cannot be offloaded in place. Code that needs a
    NumPy view therefore uses this alias.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as the alias's storage
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
