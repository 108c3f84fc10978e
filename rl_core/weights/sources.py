"""Where a receiver's bytes come from: one opener per kind of source, all giving the verified tensors of a host copy.

`source` is what the publisher wrote into OFFER or TRANSFER: {"kind": "shared", segment, nbytes} on one host, {"kind": "stream",
ticket, encrypted} across hosts, {"kind": "group", plan, rank} in a process group.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.api.errors import ConfigError
from rl_core.transports.bulk import BulkReceiver
from rl_core.transports.curve import KeyRing
from rl_core.transports.shared_memory import SegmentReader
from rl_core.weights.assembly import Assembly, Piece

if TYPE_CHECKING:
    import torch

    from rl_core.weights.collective import GroupReceiver

Tensors = Iterator[tuple[str, "torch.Tensor"]]
SILENCE_SECONDS = 15.0
"""A publisher that sends nothing for so long is gone: heartbeats and reconnection had their time."""


class Sources:
    """What a receiver keeps between syncs: mapped segments, a process group. `open` runs in one thread, the rest in any."""

    def __init__(self, *, keys: KeyRing | None, device: str, group_timeout: float) -> None:
        """`device`: where NCCL puts the bytes. `group_timeout`: seconds for a formation and for each broadcast."""
        self._keys, self._device, self._group_timeout = keys, device, group_timeout
        self._segments = SegmentReader()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group: GroupReceiver | None = None

    def open(
        self, source: Mapping[str, Any], assembly: Assembly
    ) -> AbstractContextManager[Iterator[tuple[str, "torch.Tensor"]]]:
        """Return the verified tensors of `source` inside a `with`. Raises ConfigError for an unknown kind."""
        openers = {"shared": self._shared, "stream": self._stream, "group": self._collective}
        opener = openers.get(source["kind"])
        if opener is None:
            raise ConfigError(f"source of weights must be one of {', '.join(openers)}, got {source['kind']!r}")
        return opener(source, assembly)

    @contextlib.contextmanager
    def _shared(self, source: Mapping[str, Any], assembly: Assembly) -> Iterator[Tensors]:
        view = self._segments.view(source["segment"], 0, source["nbytes"])
        yield assembly.tensors([(0, np.frombuffer(view, np.uint8))])

    @contextlib.contextmanager
    def _stream(self, source: Mapping[str, Any], assembly: Assembly) -> Iterator[Tensors]:
        keys = self._keys if source["encrypted"] else None
        chunks = iter(BulkReceiver(source["ticket"], keys, timeout=SILENCE_SECONDS, wake=self._wake))
        with contextlib.closing(chunks):
            yield assembly.tensors(_positioned(chunks))

    @contextlib.contextmanager
    def _collective(self, source: Mapping[str, Any], assembly: Assembly) -> Iterator[Tensors]:
        group = self._group_receiver()
        if source["plan"]["backend"] == "nccl":
            yield assembly.device_tensors(group.buckets(source, assembly.layout, device=self._device))
        else:
            buckets = group.buckets(source, assembly.layout, device="cpu")
            yield assembly.tensors((bucket.start, buffer.numpy()) for bucket, buffer in buckets)

    def _group_receiver(self) -> "GroupReceiver":
        if self._group is None:
            from rl_core.weights.collective import GroupReceiver

            self._group = GroupReceiver(timeout=self._group_timeout)
        return self._group

    def abort_group(self, epoch: int, generation: int, reason: str) -> None:
        """End the process group of that generation, so that a broadcast blocked in it fails at once."""
        self._group_receiver().abort(epoch, generation, reason)

    def group_ended(self, source: Mapping[str, Any]) -> bool:
        """Return whether a transfer from `source` ended because its process group did."""
        return source["kind"] == "group" and self._group_receiver().broken

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
