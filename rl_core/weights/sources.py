"""Where a receiver's bytes come from: one opener per kind of source, all giving the verified tensors of a version."""

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from rl_core.api.errors import ConfigError
from rl_core.messages.weights import (
    DeviceSource,
    GroupSource,
    MessageSource,
    PatchSource,
    SharedSource,
    StreamSource,
    WeightSource,
)
from rl_core.transports.bulk import BulkReceiver
from rl_core.transports.curve import KeyRing
from rl_core.transports.shared_memory import SegmentReader
from rl_core.weights.assembly import Assembly, Piece
from rl_core.weights.deadlines import Deadlines

if TYPE_CHECKING:
    import torch

    from rl_core.weights.collective import GroupReceiver

Tensors = Iterator[tuple[str, "torch.Tensor"]]


class Sources:
    """What a receiver keeps between syncs: mapped segments, a process group. `open` runs in one thread, the rest in any."""

    def __init__(self, *, keys: KeyRing | None, device: str, deadlines: Deadlines) -> None:
        """`device`: where NCCL puts the bytes, and the publisher's memory is mapped."""
        self._keys, self._device, self._deadlines = keys, device, deadlines
        self._segments = SegmentReader()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group: GroupReceiver | None = None
        self._maps = True
        """Whether the publisher's memory of the device could be mapped the last time."""

    def open(self, source: WeightSource, assembly: Assembly) -> AbstractContextManager[Tensors]:
        """Return the verified tensors of `source` inside a `with`. Raises ConfigError for an unknown kind."""
        if isinstance(source, SharedSource):
            return self._shared(source, assembly)
        if isinstance(source, StreamSource):
            return self._stream(source, assembly)
        if isinstance(source, GroupSource):
            return self._collective(source, assembly)
        if isinstance(source, DeviceSource):
            return self._on_device(source, assembly)
        if isinstance(source, PatchSource):
            return self._patch(source, assembly)
        raise ConfigError(f"source of weights must be shared, stream, group, ipc or patch, got {type(source).__name__}")

    @contextlib.contextmanager
    def _shared(self, source: SharedSource, assembly: Assembly) -> Iterator[Tensors]:
        yield assembly.tensors([(0, self._mapped(source))])

    def _mapped(self, source: SharedSource) -> np.ndarray:
        return np.frombuffer(self._segments.view(source.segment, 0, source.nbytes), np.uint8)

    @contextlib.contextmanager
    def _stream(self, source: StreamSource, assembly: Assembly) -> Iterator[Tensors]:
        with self._chunks(source) as chunks:
            yield assembly.tensors(_positioned(chunks))

    def _chunks(self, source: StreamSource) -> "contextlib.closing[Generator[memoryview, None, None]]":
        keys = self._keys if source.encrypted else None
        chunks = iter(BulkReceiver(source.ticket, keys, timeout=self._deadlines.silence_seconds, wake=self._wake))
        return contextlib.closing(chunks)

    @contextlib.contextmanager
    def _patch(self, source: PatchSource, assembly: Assembly) -> Iterator[Tensors]:
        if isinstance(source.data, SharedSource):
            yield assembly.patched(source, self._mapped(source.data))
            return
        if isinstance(source.data, MessageSource):
            yield assembly.patched(source, source.data.data)
            return
        with self._chunks(source.data) as chunks:
            data = np.frombuffer(b"".join(chunks), np.uint8)
        yield assembly.patched(source, data)

    @contextlib.contextmanager
    def _collective(self, source: GroupSource, assembly: Assembly) -> Iterator[Tensors]:
        group = self._group_receiver()
        if source.plan.backend == "nccl":
            yield assembly.device_tensors(group.buckets(source, assembly.layout, device=self._device))
        else:
            buckets = group.buckets(source, assembly.layout, device="cpu")
            yield assembly.tensors((bucket.start, buffer.numpy()) for bucket, buffer in buckets)

    @contextlib.contextmanager
    def _on_device(self, source: DeviceSource, assembly: Assembly) -> Iterator[Tensors]:
        from rl_core.weights.device_memory import mapped  # needs torch

        self._maps = False
        with mapped(source.handle, self._device) as whole:
            self._maps = True
            buckets = assembly.layout.buckets
            yield assembly.device_tensors((one, whole[one.start : one.start + one.nbytes]) for one in buckets)

    def _group_receiver(self) -> "GroupReceiver":
        if self._group is None:
            from rl_core.weights.collective import GroupReceiver

            self._group = GroupReceiver(timeout=self._deadlines.collective_seconds)
        return self._group

    def abort_group(self, epoch: int, generation: int, reason: str) -> None:
        """End the process group of that generation, so that a broadcast blocked in it fails at once."""
        self._group_receiver().abort(epoch, generation, reason)

    @property
    def group(self) -> str:
        """Return the key of the process group that broadcasts can come through; "" for none."""
        return self._group.key if self._group is not None else ""

    def group_ended(self, source: WeightSource) -> bool:
        """Return whether a transfer from `source` ended because its process group did, or never began: it can be offered by another way."""
        if isinstance(source, DeviceSource):
            return not self._maps
        return isinstance(source, GroupSource) and self._group_receiver().broken

    def interrupt(self) -> None:
        """End the wait for pieces, if there is one."""
        os.eventfd_write(self._wake, 1)

    def ready(self) -> None:
        """Forget interrupts of the past; before a transfer."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """Free what is kept; nothing may be open."""
        if self._group is not None:
            self._group.close()
        os.close(self._wake)


def _positioned(chunks: Iterable[memoryview]) -> Iterator[Piece]:
    position = 0
    for chunk in chunks:
        yield position, np.frombuffer(chunk, np.uint8)
        position += chunk.nbytes
