"""Writes versions to host memory and makes a patch of each against the version before it.

A new version is compared with the host copy of the previous one while it overwrites that copy, so no further copy of the model is
held; only if a late joiner still reads the previous copy is other memory used. A version has no patch if there is nothing to
compare it with: the first one of a process, the one after a source that failed, and one with other tensors than before. Whether a
receiver can use a patch depends on the version that it serves, which it names by its digest.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from rl_core.weights import checksums, patch
from rl_core.weights.host_copy import HostCopies, HostCopy, PatchCopy
from rl_core.weights.manifest import WeightEntry
from rl_core.weights.version_source import SourceEntry, VersionSource


class Comparison:
    """Collects the differences between `base` and the version that is being written, tensor by tensor."""

    def __init__(self, base: HostCopy) -> None:
        self._base = base
        self.changes: list[patch.TensorChange] = []
        self.changed = self.elements = 0

    def write_tensor(self, entry: SourceEntry, start: int, new: np.ndarray, place: np.ndarray) -> checksums.Checksum:
        """Compare `new` (uint8) with the tensor at offset `start` of the base, write it to `place`, and return its checksum.

        `place` may be the memory of the base.
        """
        old = self._base.memory.data[start : start + new.size]
        count, change, sums = patch.compare(entry.name, entry.shape, entry.dtype, old, new, place)
        self.changed += count
        self.elements += prod(entry.shape)
        self.changes += [] if change is None else [change]
        return sums


class PatchEncoder:
    """Writes versions by `copies` and adds a patch to each. Only one thread may write at a time."""

    def __init__(self, copies: HostCopies, *, verify_every: int) -> None:
        """`verify_every`: within this many patches, a receiver reads and checks every tensor as a whole once, whether it changed or not."""
        self._copies, self._verify_every = copies, verify_every
        self._base: HostCopy | None = None
        """The version that was written last; this object holds it."""
        self._patches = itertools.count(1)

    def write(self, source: VersionSource, *, version: int, epoch: int, device: str = "cpu") -> HostCopy:
        """Return a new copy of `source`, with a patch if there is a previous version and the patch is smaller than all weights.

        Raises the errors of `HostCopies.write`.
        """
        base, self._base = self._base, None
        if base is not None and base.patch is not None:
            self._copies.free(base.patch.memory)
        if base is None or not _same_tensors(base, source):
            if base is not None:
                self._copies.drop(base, self)
            copy = self._copies.write(source, version=version, epoch=epoch, device=device)
            self._copies.hold(copy, self)
            self._base = copy = replace(copy, patches_follow=True)
            return copy
        return self._write_after(base, source, version=version, epoch=epoch, device=device)

    def _write_after(self, base: HostCopy, source: VersionSource, *, version: int, epoch: int, device: str) -> HostCopy:
        comparison = Comparison(base)
        try:
            copy = self._copies.write(
                source, version=version, epoch=epoch, device=device, base=base, writer=comparison.write_tensor
            )
        except BaseException:
            self._copies.drop(base, self)
            raise
        if copy.memory is not base.memory:
            self._copies.hold(copy, self)
            self._copies.drop(base, self)
        self._base = copy  # held already, whatever happens to its patch
        self._base = copy = self._with_patch(copy, base, comparison)
        return copy

    def _with_patch(self, copy: HostCopy, base: HostCopy, comparison: Comparison) -> HostCopy:
        share = comparison.changed / max(comparison.elements, 1)
        nbytes = patch.size_of(comparison.changes)
        if nbytes >= copy.manifest.total_bytes:
            return replace(copy, patch_share=share, patches_follow=True)
        memory = self._copies.allocate(nbytes)
        tensors = patch.fill(memory.data, comparison.changes)
        verify = tensors_to_verify(copy.manifest.entries, next(self._patches), self._verify_every)
        patch_copy = PatchCopy(base=base.manifest.digest, tensors=tensors, memory=memory, nbytes=nbytes, verify=verify)
        return replace(copy, patch=patch_copy, patch_share=share, patches_follow=True)


def tensors_to_verify(entries: Sequence[WeightEntry], number: int, interval: int) -> tuple[str, ...]:
    """Return the names of the tensors that receivers of patch `number` check as a whole.

    Each tensor is checked once in `interval` patches; about the same number of bytes is checked in each patch.
    """
    total = sum(entry.nbytes for entry in entries if entry.alias_of is None)
    names, start = [], 0
    for entry in entries:
        if entry.alias_of is None and entry.nbytes:
            if start * interval // total == number % interval:
                names.append(entry.name)
            start += entry.nbytes
    return tuple(names)


def _same_tensors(base: HostCopy, source: VersionSource) -> bool:
    """Return whether `base` and `source` have the same names, shapes, types and layout."""
    base_tensors = [(entry.name, entry.shape, entry.dtype, entry.alias_of) for entry in base.manifest.entries]
    source_tensors = [(entry.name, entry.shape, entry.dtype, entry.alias_of) for entry in source.entries]
    return base_tensors == source_tensors and base.layout == source.layout
