"""Copies between host and device that wait for the device as rarely as possible.

A copy from pageable memory to a device, like each copy to the host, lets the calling thread wait until the device has done all work that
was queued before.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: a multiple of the size of each type."""


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the CPU `tensors` on `device`, with one copy for all of them, which nobody waits for.

    They are put together in one page-locked buffer. On a CPU the tensors themselves are returned.
    """
    if device.type == "cpu":
        return dict(tensors)
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(end, end + tensor.numel() * tensor.element_size())
        end = -(-places[name].stop // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in tensors.items():
        _view(buffer[places[name]], tensor).copy_(tensor)
    device_buffer = buffer.to(device, non_blocking=True)
    return {name: _view(device_buffer[places[name]], tensor) for name, tensor in tensors.items()}


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `tensors`, which have one type and device, on the CPU, with one copy for all of them."""
    sources = list(tensors)
    if not sources or sources[0].device.type == "cpu":
        return sources
    parts = torch.cat([tensor.reshape(-1) for tensor in sources]).cpu().split([tensor.numel() for tensor in sources])
    return [part.view(tensor.shape) for part, tensor in zip(parts, sources, strict=True)]


def _view(raw: Tensor, like: Tensor) -> Tensor:
    return raw.view(like.dtype).view(like.shape)
