"""The publisher's copy of a version in host memory, laid out as buckets in a segment of shared memory.

`HostCopies.write` consumes the buckets of a source and sums while it copies; receivers of this host map the segment, all
others get slices of it. What is held, when and why:

- From the first bucket of a version to the first of the next: one copy. Receivers load it, late joiners pull it.
- The publisher gives a copy up before it writes the next version, which so goes into the same memory: page faults are paid
  once, and the model is in host memory once besides the trainer's own.
- A second copy exists only while a late joiner still reads the older one; its segment goes back to the pool with the joiner.
- With patches the copy is what the next version is compared with: that is written over it, tensor by tensor (`chain`).
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_core.messages.weights import TensorPatch
from rl_core.transports.bulk import Share
from rl_core.transports.dtypes import CODES, tensor_view
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights import words
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.manifest import WeightEntry, WeightManifest, host_bytes
from rl_core.weights.version_source import SourceBucket, SourceEntry, VersionSource

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Take = Callable[[SourceEntry, int, np.ndarray, np.ndarray], words.Sums]
"""Writes a tensor, given (entry, its position in the whole, its bytes, where they belong), and returns its checksum."""


@dataclass(eq=False, slots=True)
class HostMemory:
    """Room for a version; where it is, and who needs it."""

    data: np.ndarray
    """uint8 [layout.nbytes]."""
    segment: str | None
    """Name of the segment; None when /dev/shm was full and the memory is private."""
    generation: int = 0
    """Which lending of the segment this is."""
    is_there: Callable[[], bool] = lambda: False
    """Tells whether the segment's name still leads to it."""
    told: bool = False
    """Whether it was logged that it does not."""
    holders: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True, eq=False, slots=True)
class PatchCopy:
    """What changed since another version, in host memory."""

    base: str
    """Digest of that version."""
    tensors: tuple[TensorPatch, ...]
    memory: HostMemory
    nbytes: int
    verify: tuple[str, ...]
    """Tensors that its receivers read whole, changed or not."""
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, eq=False, slots=True)
class HostCopy:
    """One version in host memory; read-only once written."""

    manifest: WeightManifest
    layout: Layout
    memory: HostMemory
    share: Share = field(default_factory=Share)
    """Key and tags of its streams."""
    patch: PatchCopy | None = None
    """What changed since the version before it; None = nothing to compare with, or not smaller than all of it."""
    patch_share: float | None = None
    """Share of the elements that changed; None = nothing to compare with."""
    chained: bool = False
    """Whether the versions after it may come as patches."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of `memory` that are used."""
        return self.layout.nbytes

    def buckets(self, device: str) -> "Iterator[tuple[Bucket, torch.Tensor]]":
        """Yield (bucket, its bytes as uint8 on `device`)."""
        import torch

        for bucket in self.layout.buckets:
            yield bucket, torch.from_numpy(self.memory.data[bucket.start : bucket.start + bucket.nbytes]).to(device)


class HostCopies:
    """Writes the copies and keeps their memory. One thread writes at a time; any may `hold` and `drop`."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        """Guards the holders of all copies: of two that drop at once, only the last frees the memory."""

    def write(
        self,
        source: VersionSource,
        *,
        version: int,
        epoch: int,
        device: str = "cpu",
        base: HostCopy | None = None,
        take: Take | None = None,
    ) -> HostCopy:
        """Return a new copy of `source`, whose buckets are taken on `device`; nobody holds it yet.

        It is written over `base`, a copy of the same layout, where only one holds that. `take` writes each tensor; None = it is copied.
        Raises ValueError when the source does not give what its entries say.
        """
        layout = source.layout
        over = base.memory if base is not None and self._may_write_over(base.memory) else None
        memory = over or self.lend(layout.nbytes)
        try:
            sums: dict[str, words.Sums] = {}
            for bucket in source.buckets(device):
                sums.update(_write_bucket(memory.data, bucket, source, take))
            manifest = WeightManifest(version=version, epoch=epoch, entries=tuple(_with_sums(source.entries, sums)))
        except BaseException:
            if over is None:
                self.give_back(memory)
            raise
        return HostCopy(manifest, layout, memory)

    def _may_write_over(self, memory: HostMemory) -> bool:
        with self._lock:
            alone = len(memory.holders) == 1
        return alone and (memory.segment is None or memory.is_there())

    def hold(self, copy: HostCopy, holder: Hashable) -> None:
        """Keep the memory of `copy` until `drop` for the same holder."""
        with self._lock:
            copy.memory.holders.add(holder)

    def drop(self, copy: HostCopy, holder: Hashable) -> None:
        """End a hold; the last one frees the memory for a later version."""
        with self._lock:
            copy.memory.holders.discard(holder)
            unheld = not copy.memory.holders
        if unheld:
            self.give_back(copy.memory)

    def close(self) -> None:
        """Free every segment."""
        self._store.release_holder(self)

    def give_back(self, memory: HostMemory) -> None:
        """Free memory that nobody holds."""
        if memory.segment is not None:
            self._store.release(memory.segment, memory.generation, self)

    def lend(self, nbytes: int) -> HostMemory:
        """Return memory for `nbytes`, a segment where there is room for one."""
        segment = self._store.lend(nbytes, self)
        if segment is None:
            logger.warning("no shared memory for %d bytes of weights; receivers of this host get a stream", nbytes)
            return HostMemory(np.empty(nbytes, np.uint8), None)
        data = np.frombuffer(segment.memory, np.uint8, nbytes)
        return HostMemory(data, segment.name, segment.generation, segment.is_there)


def _write_bucket(
    data: np.ndarray, bucket: SourceBucket, source: VersionSource, take: Take | None
) -> Iterator[tuple[str, words.Sums]]:
    for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
        entry = source.entries[index]
        own = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if own != (entry.shape, entry.dtype):
            raise ValueError(
                f"{entry.name!r} must be {entry.dtype} {list(entry.shape)} as its entry says, got {own[1]} {list(own[0])}"
            )
        start = source.layout.starts[index]
        place = data[start : start + entry.nbytes]
        if take is None:
            yield entry.name, write_tensor(place, tensor, entry)
        else:
            yield entry.name, take(entry, start, host_bytes(tensor.cpu()), place)


def _with_sums(entries: Sequence[SourceEntry], sums: Mapping[str, words.Sums]) -> Iterator[WeightEntry]:
    for entry in entries:
        travels = entry.alias_of or entry.name
        if travels not in sums:
            raise ValueError(f"a source must give every tensor of its entries, {travels!r} is missing")
        yield WeightEntry(entry.name, entry.shape, entry.dtype, entry.nbytes, sums[travels], entry.alias_of)


def write_tensor(memory: np.ndarray, tensor: "torch.Tensor", entry: SourceEntry) -> words.Sums:
    """Write `tensor` to `memory` and return its checksum; from a CPU in one pass."""
    if tensor.device.type == "cpu":
        return words.copy_bytes(memory, host_bytes(tensor))
    tensor_view(memory.data, CODES[entry.dtype], entry.shape, copy=False).copy_(tensor.detach())
    return words.sum_bytes(memory)
