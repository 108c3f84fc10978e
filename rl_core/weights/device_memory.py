"""A version in memory of the trainer's device, which a receiver on the same device maps (CUDA IPC): it is copied once, never over a bus.

The publisher fills the memory on the way to the host copy, gives each receiver a handle, and frees it after the last ACK. On a CPU the
same steps take shared memory by name: no job may ask for that, tests run it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.offload import bytes_of
from rl_core.weights.version_source import SourceBucket, VersionSource

Handle = tuple[int | bytes | bool, ...]
"""What torch maps a storage by in another process; good for one mapping."""


class DeviceMemory:
    """Room for one version at a time."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None
        """uint8 [layout.nbytes]."""

    def filled_by(self, source: VersionSource) -> VersionSource:
        """Return `source`, whose buckets are copied here as they are taken."""
        return _Filling(source, self)

    def take(self, nbytes: int, device: str) -> Tensor:
        """Return room for a version of that size."""
        self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._whole

    def handle(self) -> Handle:
        """Return a handle for one receiver; what was queued before is in the memory once it maps it."""
        if self._whole is None:
            raise AssertionError("bug: device memory must be filled before it is handed out")
        storage = self._whole.untyped_storage()
        return tuple(storage._share_cuda_() if storage.is_cuda else storage._share_filename_cpu_())

    def free(self) -> None:
        """Give the memory up, once nobody maps it any more."""
        on_gpu = self._whole is not None and self._whole.is_cuda
        self._whole = None
        if on_gpu:
            torch.cuda.ipc_collect()


class _Filling:
    """A `VersionSource` that copies what passes through it."""

    def __init__(self, source: VersionSource, memory: DeviceMemory) -> None:
        self._source, self._memory = source, memory
        self.entries, self.layout = source.entries, source.layout

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets of the source on `device`."""
        whole = self._memory.take(self.layout.nbytes, device)
        for bucket in self._source.buckets(device):
            for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                start = self.layout.starts[index]
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                whole[start : start + flat.numel()].copy_(flat)
            yield bucket


@contextmanager
def mapped(handle: Handle, device: str) -> Iterator[Tensor]:
    """Give the publisher's memory as uint8 [nbytes] inside a `with`; `device`: the number it has in this process."""
    place = torch.device(device)
    if place.type != "cuda":
        yield bytes_of(torch.UntypedStorage._new_shared_filename_cpu(*handle))
        return
    with torch.cuda.device(place):
        storage = torch.UntypedStorage._new_shared_cuda(place.index or 0, *handle[1:])
    try:
        yield bytes_of(storage)
    finally:
        # The engine's copies are only queued: they must end before the ACK lets the publisher free what they read.
        torch.cuda.current_stream(place).synchronize()
