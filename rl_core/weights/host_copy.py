"""The publisher's copy of a version in host memory, laid out as buckets in a shared-memory segment.

`HostCopies.write` copies the buckets of a source and computes checksums in the same pass. Receivers on this host map the segment;
all others are sent slices of it. The memory is managed as follows:

- One copy exists from the first bucket of a version to the first bucket of the next. Receivers load it and late joiners pull it.
- The publisher releases a copy before it writes the next version, which therefore reuses the memory: page faults are paid once, and
  the model is in host memory only once besides the memory of the trainer.
- A second copy exists only while a late joiner still reads the older one. Its segment is freed when the joiner is done.
- With patches, the copy is what the next version is compared with. The next version overwrites it tensor by tensor (`patch_encoder`).
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_core.messages.weights import TensorPatch
from rl_core.transports.bulk import SharedTags
from rl_core.transports.dtypes import CODES, tensor_view
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights import checksums
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.manifest import WeightEntry, WeightManifest, host_bytes
from rl_core.weights.version_source import SourceBucket, SourceEntry, VersionSource

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

WriteTensor = Callable[[SourceEntry, int, np.ndarray, np.ndarray], checksums.Checksum]
"""Function (entry, offset in the copy, bytes of the tensor, memory to write to) that writes a tensor and returns its checksum."""


@dataclass(eq=False, slots=True)
class HostMemory:
    """Memory for one version, and who uses it."""

    data: np.ndarray
    """uint8 [layout.nbytes]."""
    segment: str | None
    """Name of the shared-memory segment; None if /dev/shm was full and the memory is private."""
    generation: int = 0
    """Number of the allocation of this segment, which tells reuses apart."""
    exists: Callable[[], bool] = lambda: False
    """Returns whether the segment still exists under its name."""
    removal_logged: bool = False
    """Whether the removal of the segment by another process was logged."""
    holders: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True, eq=False, slots=True)
class PatchCopy:
    """A patch in host memory."""

    base: str
    """Digest of the version that the patch applies to."""
    tensors: tuple[TensorPatch, ...]
    memory: HostMemory
    nbytes: int
    verify: tuple[str, ...]
    """Tensors that receivers check as a whole, whether they changed or not."""
    share: SharedTags = field(default_factory=SharedTags)


@dataclass(frozen=True, eq=False, slots=True)
class HostCopy:
    """One version in host memory. It is not changed after it was written."""

    manifest: WeightManifest
    layout: Layout
    memory: HostMemory
    share: SharedTags = field(default_factory=SharedTags)
    """Key and tags shared by all streams of this copy."""
    patch: PatchCopy | None = None
    """Patch against the previous version; None if there is no such version or the patch is not smaller than all weights."""
    patch_share: float | None = None
    """Fraction of the elements that changed since the previous version; None if there is none."""
    patches_follow: bool = False
    """Whether later versions may be sent as patches."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of `memory` that are used."""
        return self.layout.nbytes

    def buckets(self, device: str) -> "Iterator[tuple[Bucket, torch.Tensor]]":
        """Yield (bucket, its bytes as uint8 on `device`)."""
        import torch

        for bucket in self.layout.buckets:
            yield bucket, torch.from_numpy(self.memory.data[bucket.start : bucket.start + bucket.nbytes]).to(device)


class HostCopies:
    """Writes host copies and manages their memory. Only one thread may write at a time; any thread may call `hold` and `drop`."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        """Guards the holders of all copies: if two threads call `drop` at once, only the last one frees the memory."""

    def write(
        self,
        source: VersionSource,
        *,
        version: int,
        epoch: int,
        device: str = "cpu",
        base: HostCopy | None = None,
        writer: WriteTensor | None = None,
    ) -> HostCopy:
        """Return a new copy of `source`, whose buckets are requested on `device`. The copy has no holder yet.

        The copy reuses the memory of `base`, a copy of the same layout, if `base` has only one holder. `writer` writes each tensor; by default
        tensors are only copied. Raises ValueError if a tensor of the source does not match its entry or is missing.
        """
        layout = source.layout
        reused = base.memory if base is not None and self._can_overwrite(base.memory) else None
        memory = reused or self.allocate(layout.nbytes)
        try:
            sums: dict[str, checksums.Checksum] = {}
            for bucket in source.buckets(device):
                sums.update(_write_bucket(memory.data, bucket, source, writer))
            manifest = WeightManifest(version=version, epoch=epoch, entries=tuple(_with_sums(source.entries, sums)))
        except BaseException:
            if reused is None:
                self.free(memory)
            raise
        return HostCopy(manifest, layout, memory)

    def overwritable(self, copy: HostCopy) -> HostMemory:
        """Return the memory of `copy` if it has only one holder, else new memory with the same bytes."""
        if self._can_overwrite(copy.memory):
            return copy.memory
        memory = self.allocate(copy.nbytes)
        np.copyto(memory.data[: copy.nbytes], copy.memory.data[: copy.nbytes])
        return memory

    def _can_overwrite(self, memory: HostMemory) -> bool:
        with self._lock:
            has_single_holder = len(memory.holders) == 1
        return has_single_holder and (memory.segment is None or memory.exists())

    def hold(self, copy: HostCopy, holder: Hashable) -> None:
        """Keep the memory of `copy` until `drop` is called for the same holder."""
        with self._lock:
            copy.memory.holders.add(holder)

    def drop(self, copy: HostCopy, holder: Hashable) -> None:
        """End a hold. The memory is freed for later versions when the last hold ends."""
        with self._lock:
            copy.memory.holders.discard(holder)
            unheld = not copy.memory.holders
        if unheld:
            self.free(copy.memory)

    def close(self) -> None:
        """Free every segment."""
        self._store.release_holder(self)

    def free(self, memory: HostMemory) -> None:
        """Free memory that has no holder."""
        if memory.segment is not None:
            self._store.release(memory.segment, memory.generation, self)

    def allocate(self, nbytes: int) -> HostMemory:
        """Return memory of `nbytes`: a shared-memory segment if one can be allocated, else private memory."""
        segment = self._store.lend(nbytes, self)
        if segment is None:
            logger.warning("no shared memory for %d bytes of weights; receivers of this host get a stream", nbytes)
            return HostMemory(np.empty(nbytes, np.uint8), None)
        data = np.frombuffer(segment.memory, np.uint8, nbytes)
        return HostMemory(data, segment.name, segment.generation, segment.is_there)


def _write_bucket(
    data: np.ndarray, bucket: SourceBucket, source: VersionSource, writer: WriteTensor | None
) -> Iterator[tuple[str, checksums.Checksum]]:
    for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
        entry = source.entries[index]
        actual = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if actual != (entry.shape, entry.dtype):
            raise ValueError(
                f"{entry.name!r} must be {entry.dtype} {list(entry.shape)} as its entry says, got {actual[1]} {list(actual[0])}"
            )
        start = source.layout.starts[index]
        place = data[start : start + entry.nbytes]
        if writer is None:
            yield entry.name, write_tensor(place, tensor, entry)
        else:
            yield entry.name, writer(entry, start, host_bytes(tensor.cpu()), place)


def _with_sums(entries: Sequence[SourceEntry], sums: Mapping[str, checksums.Checksum]) -> Iterator[WeightEntry]:
    for entry in entries:
        sent_name = entry.alias_of or entry.name
        if sent_name not in sums:
            raise ValueError(f"a source must give every tensor of its entries, {sent_name!r} is missing")
        yield WeightEntry(entry.name, entry.shape, entry.dtype, entry.nbytes, sums[sent_name], entry.alias_of)


def write_tensor(memory: np.ndarray, tensor: "torch.Tensor", entry: SourceEntry) -> checksums.Checksum:
    """Write `tensor` into `memory` and return its checksum. A CPU tensor is read in one pass."""
    if tensor.device.type == "cpu":
        return checksums.copy_bytes(memory, host_bytes(tensor))
    tensor_view(memory.data, CODES[entry.dtype], entry.shape, copy=False).copy_(tensor.detach())
    return checksums.sum_bytes(memory)
