"""Opens each kind of source at a receiver; every kind yields the verified tensors of a version."""

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


class SourceReader:
    """Keeps mapped segments and the process group between syncs. `open` runs in one thread; the other methods in any."""

    def __init__(self, *, keys: KeyRing | None, device: str, deadlines: Deadlines) -> None:
        """`device`: device on which NCCL receives and the publisher's device buffer is mapped."""
        self._keys, self._device, self._deadlines = keys, device, deadlines
        self._segments = SegmentReader()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group: GroupReceiver | None = None
        self.opened = False
        """Whether the handle of the last `DeviceSource` was opened."""

    def open(self, source: WeightSource, assembly: Assembly) -> AbstractContextManager[Tensors]:
        """Return a context manager that gives the verified tensors of `source`. Raises ConfigError for an unknown kind."""
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
        from rl_core.weights.device_buffer import mapped  # needs torch

        self.opened = False
        with mapped(source.handles[0], self._device) as memory:
            self.opened = True
            buckets = assembly.layout.buckets
            yield assembly.device_tensors(
                (bucket, memory[bucket.start : bucket.start + bucket.nbytes]) for bucket in buckets
            )

    def _group_receiver(self) -> "GroupReceiver":
        if self._group is None:
            from rl_core.weights.collective import GroupReceiver

            self._group = GroupReceiver(timeout=self._deadlines.collective_seconds)
        return self._group

    @property
    def group(self) -> str:
        """Return the key of the usable process group; "" if there is none."""
        return self._group.key if self._group is not None else ""

    def group_ended(self, source: WeightSource) -> bool:
        """Return whether a transfer from `source` failed because of its process group or mapping.

        The version can then be offered in another way.
        """
        if isinstance(source, DeviceSource):
            return not self.opened
        return isinstance(source, GroupSource) and self._group_receiver().broken

    def leave_group(self, reason: str) -> None:
        """End the process group, if there is one, for all its members, so that they do not wait for this one."""
        if self._group is not None:
            self._group.abort(reason)

    def interrupt(self) -> None:
        """End the wait for data, if there is one."""
        os.eventfd_write(self._wake, 1)

    def ready(self) -> None:
        """Clear earlier interrupts, before a transfer."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """Free all resources. No source may be open."""
        if self._group is not None:
            self._group.close()
        os.close(self._wake)


def _positioned(chunks: Iterable[memoryview]) -> Iterator[Piece]:
    position = 0
    for chunk in chunks:
        yield position, np.frombuffer(chunk, np.uint8)
        position += chunk.nbytes
