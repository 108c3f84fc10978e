"""`DeviceBuffer` keeps one version of the weights on a device of the trainer.

Receivers on the same device map it (CUDA IPC), and a process group gets it by a broadcast (NCCL). The publisher fills the buffer while it
writes the host copy, and frees it after every receiver has acknowledged the version or failed. Other ranks of the trainer fill buffers for
the receivers on their own devices (`actors.device_copies`). On a CPU the buffer is in shared memory; only tests do this.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.offload import bytes_of
from rl_core.weights.version_source import SourceBucket, VersionSource

logger = logging.getLogger(__name__)

Handle = tuple[int | bytes | bool, ...]
"""Arguments by which torch maps a storage in another process; usable once."""


class DeviceBuffer:
    """Memory on the trainer's device with a copy of one version, from which receivers read."""

    def __init__(self, *, optional: bool) -> None:
        """`optional`: whether a version is sent from host memory when the device has no memory for the buffer.

        If false, `allocate` then raises torch.OutOfMemoryError.
        """
        self._optional = optional
        self._buffer: Tensor | None = None
        """uint8 [layout.nbytes]."""

    @property
    def is_allocated(self) -> bool:
        """Return whether the buffer is allocated. It holds a version after all buckets of `copying` were read."""
        return self._buffer is not None

    def copying(self, source: VersionSource) -> VersionSource:
        """Return a source with the same buckets as `source`. Reading a bucket from it also copies the bucket into this buffer.

        The buffer is allocated when the first bucket is read. If it is optional and there is no memory for it, nothing is copied. An error
        while buckets are read frees it.
        """
        return _CopyingSource(source, self)

    def allocate(self, nbytes: int, device: str) -> Tensor | None:
        """Allocate and return the buffer, uint8 [nbytes] on `device`; None if it is optional and there is no memory for it."""
        self._buffer = None
        try:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            if not self._optional:
                raise
            logger.warning("%s has no memory for %d bytes of weights; they are sent from host memory", device, nbytes)
        return self._buffer

    def buckets(self, layout: Layout) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield (bucket, its bytes as uint8) of the version in the buffer, which has `layout`."""
        for bucket in layout.buckets:
            yield bucket, self.part(bucket)

    def part(self, bucket: Bucket) -> Tensor:
        """Return the memory of `bucket`, uint8 [nbytes]. The buffer must be allocated."""
        assert self._buffer is not None
        return self._buffer[bucket.start : bucket.start + bucket.nbytes]

    def handle(self) -> Handle:
        """Return a handle with which one receiver maps the buffer.

        The receiver sees all that this thread copied into the buffer before this call.
        """
        if self._buffer is None:
            raise AssertionError("bug: the buffer must be allocated before a handle is made")
        return handle_of(self._buffer.untyped_storage())

    def free(self, unused: Iterable[Handle] = ()) -> None:
        """Drop the buffer. Its memory is freed when no receiver maps it any more.

        `unused` are handles with which no receiver maps it or will map it.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        for handle in unused:
            release(buffer.untyped_storage(), handle)
        on_gpu = buffer.is_cuda
        del buffer
        if on_gpu:
            torch.cuda.ipc_collect()


class _CopyingSource:
    """A `VersionSource` that copies its buckets into a `DeviceBuffer`."""

    def __init__(self, source: VersionSource, device_buffer: DeviceBuffer) -> None:
        self._source, self._device_buffer = source, device_buffer
        self.entries, self.layout = source.entries, source.layout

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets of the source on `device`."""
        if self._device_buffer.allocate(self.layout.nbytes, device) is None:
            yield from self._source.buckets(device)
            return
        try:
            for bucket in self._source.buckets(device):
                write(bucket.tensors, bucket.place, self._device_buffer.part(bucket.place))
                yield bucket
        except BaseException:
            self._device_buffer.free()
            raise


def write(tensors: Iterable[Tensor], bucket: Bucket, memory: Tensor) -> None:
    """Copy the `tensors` of `bucket` into its `memory`, uint8 [nbytes]."""
    for offset, tensor in zip(bucket.offsets, tensors, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        memory[offset : offset + flat.numel()].copy_(flat)


def handle_of(storage: torch.UntypedStorage) -> Handle:
    """Return a handle by which one other process maps `storage`. Memory of a CPU is moved to shared memory.

    The memory stays allocated until that process has mapped it and given it up again, or until `release` is called.
    """
    if storage.is_cuda:
        return tuple(storage._share_cuda_())
    handle = tuple(storage._share_filename_cpu_())
    storage._shared_incref()  # as `_share_cuda_` does
    return handle


def release(storage: torch.UntypedStorage, handle: Handle) -> None:
    """Discard a handle of `storage` that no process has used or will use. Without this call the memory of `storage` is never freed."""
    if storage.is_cuda:
        _, _, _, _, counter, position, *_ = handle
        torch.UntypedStorage._release_ipc_counter_cuda(counter, position)
    else:
        storage._shared_decref()


@contextmanager
def mapped(handle: Handle, device: str) -> Iterator[Tensor]:
    """Map the memory of another process as uint8 [nbytes] within a `with` block. `device`: name of the device in this process."""
    torch_device = torch.device(device)
    if torch_device.type != "cuda":
        yield bytes_of(torch.UntypedStorage._new_shared_filename_cpu(*handle)._shared_decref())
        return
    with torch.cuda.device(torch_device):
        storage = torch.UntypedStorage._new_shared_cuda(torch_device.index or 0, *handle[1:])
    try:
        yield bytes_of(storage)
    finally:
        # The engine's copies are only queued: they must end before the ACK lets the publisher free what they read.
        torch.cuda.current_stream(torch_device).synchronize()
