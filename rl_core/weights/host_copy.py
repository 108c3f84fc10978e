"""The publisher's copies of the weights in host memory, laid out as buckets in shared-memory segments.

`HostCopies.write` puts a version into a free segment, casting and summing while it copies; receivers of this host map it,
all others get slices of it. A copy is `held` by the publisher while it is the committed one and by every late joiner that
reads it; its segment is used again by a later version, so that page faults are paid once (two segments in turn, normally).
"""

import logging
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.transports.bulk import Share
from rl_core.transports.dtypes import CODES, ITEMSIZES, tensor_view
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights import words
from rl_core.weights.bucket import Layout
from rl_core.weights.manifest import TieFinder, WeightEntry, WeightManifest, checksum, host_bytes, wire_dtype

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
State = Mapping[str, "torch.Tensor"] | Iterable[tuple[str, "torch.Tensor"]]


@dataclass(eq=False, slots=True)
class HostCopy:
    """One version in host memory; read-only once written."""

    manifest: WeightManifest
    layout: Layout
    memory: np.ndarray
    """uint8 [layout.nbytes]."""
    segment: str | None
    """Name of the segment; None when /dev/shm was full and the memory is private."""
    generation: int = 0
    holders: set[Hashable] = field(default_factory=set)
    share: Share = field(default_factory=Share)
    """Key and tags of its streams."""


class HostCopies:
    """Writes and keeps the copies. One thread writes at a time; `hold` and `drop` belong to the publisher's loop."""

    def __init__(self, store: SegmentStore, *, bucket_bytes: int, dtype: str | None) -> None:
        """`dtype`: type of floating tensors on the wire; None = their own."""
        self._store = store
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._plan: tuple[tuple[WeightEntry, ...], Layout] | None = None

    def write(self, state: State, *, version: int, epoch: int, ties: Mapping[str, str] | None = None) -> HostCopy:
        """Return a new copy of `state` (names in the same order each time), held by nobody yet.

        The first call holds all tensors at once to find out which names are tied (besides `ties`, alias -> name); later ones
        take them one by one. Raises ValueError when the names, shapes or ties are not those of the first call.
        """
        tensors = state.items() if isinstance(state, Mapping) else state
        if self._plan is None:
            tensors = list(tensors)
            self._plan = self._make_plan(tensors, ties)
        entries, layout = self._plan
        copy = self._allocate(layout)
        try:
            written = _write_all(tensors, entries, layout, copy.memory)
        except BaseException:
            self.drop(copy, None)
            raise
        copy.manifest = WeightManifest(version=version, epoch=epoch, entries=written)
        return copy

    def hold(self, copy: HostCopy, holder: Hashable) -> None:
        """Keep `copy` until `drop` for the same holder."""
        copy.holders.add(holder)

    def drop(self, copy: HostCopy, holder: Hashable) -> None:
        """End a hold; the last one frees the segment for a later version."""
        copy.holders.discard(holder)
        if not copy.holders and copy.segment is not None:
            self._store.release(copy.segment, copy.generation, self)

    def close(self) -> None:
        """Free every segment."""
        self._store.release_holder(self)

    def _make_plan(
        self, tensors: list[tuple[str, "torch.Tensor"]], ties: Mapping[str, str] | None
    ) -> tuple[tuple[WeightEntry, ...], Layout]:
        finder, entries = TieFinder(ties), []
        for name, tensor in tensors:
            wire = wire_dtype(tensor, self._dtype)
            entry = WeightEntry(name, tuple(tensor.shape), wire, tensor.numel() * ITEMSIZES[CODES[wire]], (0, 0))
            entries.append(finder.resolve(entry, tensor))
        WeightManifest(
            version=0, epoch=0, entries=tuple(entries)
        )  # duplicates and emptiness are refused before any copy
        return tuple(entries), Layout.of(entries, self._bucket_bytes)

    def _allocate(self, layout: Layout) -> HostCopy:
        segment = self._store.lend(layout.nbytes, self)
        manifest: Any = None
        if segment is None:
            logger.warning(
                "no shared memory for %d bytes of weights; receivers of this host get a stream", layout.nbytes
            )
            return HostCopy(manifest, layout, np.empty(layout.nbytes, np.uint8), None)
        memory = np.frombuffer(segment.memory, np.uint8, layout.nbytes)
        return HostCopy(manifest, layout, memory, segment.name, segment.generation)


def _write_all(
    tensors: Iterable[tuple[str, "torch.Tensor"]],
    entries: tuple[WeightEntry, ...],
    layout: Layout,
    memory: np.ndarray,
) -> tuple[WeightEntry, ...]:
    import torch

    written: dict[str, WeightEntry] = {}
    for name, tensor in tensors:
        index = len(written)
        entry = entries[index] if index < len(entries) else None
        if entry is None or (entry.name, entry.shape) != (name, tuple(tensor.shape)):
            expected = f"{entry.name!r} {list(entry.shape)}" if entry is not None else "no more tensors"
            raise ValueError(
                f"the tensors of a model must not change between versions: expected {expected}, got {name!r} {list(tensor.shape)}"
            )
        if entry.alias_of is None:
            start = layout.starts[index]
            sums = write_tensor(memory[start : start + entry.nbytes], tensor, entry)
        else:
            sums = checksum(tensor.to(getattr(torch, entry.dtype)))
            if sums != written[entry.alias_of].checksum:
                raise ValueError(
                    f"{name!r} must stay equal to {entry.alias_of!r}, to which it is tied; its values differ"
                )
        written[name] = replace(entry, checksum=sums)
    if len(written) < len(entries):
        raise ValueError(
            f"the tensors of a model must not change between versions: {entries[len(written)].name!r} is gone"
        )
    return tuple(written.values())


def write_tensor(memory: np.ndarray, tensor: "torch.Tensor", entry: WeightEntry) -> words.Sums:
    """Write `tensor` in the wire type of `entry` to `memory` and return its checksum; a plain copy is one pass."""
    own = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type == "cpu" and own == entry.dtype:
        return words.copy_bytes(memory, host_bytes(tensor))
    tensor_view(memory.data, CODES[entry.dtype], entry.shape, copy=False).copy_(tensor.detach())
    return words.sum_bytes(memory)
