"""The publisher's chain of versions: each is compared with the one before it while it is written, and what changed is its patch.

The host copy of the version before is what is compared with, so that no further copy of the model is held: the next version
is written over it, unless a late joiner still reads it. The chain breaks with the process, with a source that fails in the
middle and with a model of other tensors: the version after that has no patch. Whether a receiver can take a patch is its own
matter: it names the digest that it serves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from rl_core.weights import patch, words
from rl_core.weights.host_copy import HostCopies, HostCopy, PatchCopy
from rl_core.weights.manifest import WeightEntry
from rl_core.weights.version_source import SourceEntry, VersionSource


class Comparison:
    """What differs between `base` and the version that is being written, gathered tensor by tensor."""

    def __init__(self, base: HostCopy) -> None:
        self._base = base
        self.changes: list[patch.Change] = []
        self.changed = self.elements = 0

    def take(self, entry: SourceEntry, start: int, new: np.ndarray, place: np.ndarray) -> words.Sums:
        """Compare the tensor `new` (uint8) with the one at `start`, write it to `place`, perhaps over that one, and return its checksum."""
        old = self._base.memory.data[start : start + new.size]
        count, change, sums = patch.compare(entry.name, entry.shape, entry.dtype, old, new, place)
        self.changed += count
        self.elements += prod(entry.shape)
        self.changes += [] if change is None else [change]
        return sums


class Chain:
    """Writes versions with `copies`, one thread at a time."""

    def __init__(self, copies: HostCopies, *, verify_every: int) -> None:
        """`verify_every`: in so many patches each tensor is read whole once by who takes them, changed or not."""
        self._copies, self._verify_every = copies, verify_every
        self._base: HostCopy | None = None
        """The version written last, held."""
        self._patches = itertools.count(1)

    def write(self, source: VersionSource, *, version: int, epoch: int, device: str = "cpu") -> HostCopy:
        """Return a new copy of `source`, with its patch where there is a base and the patch is smaller. Raises as `HostCopies.write`."""
        base, self._base = self._base, None
        if base is not None and base.patch is not None:
            self._copies.give_back(base.patch.memory)
        if base is None or not _alike(base, source):
            if base is not None:
                self._copies.drop(base, self)
            copy = self._copies.write(source, version=version, epoch=epoch, device=device)
            self._copies.hold(copy, self)
            self._base = copy = replace(copy, chained=True)
            return copy
        return self._write_after(base, source, version=version, epoch=epoch, device=device)

    def _write_after(self, base: HostCopy, source: VersionSource, *, version: int, epoch: int, device: str) -> HostCopy:
        comparison = Comparison(base)
        try:
            copy = self._copies.write(
                source, version=version, epoch=epoch, device=device, base=base, take=comparison.take
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
            return replace(copy, patch_share=share, chained=True)
        memory = self._copies.lend(nbytes)
        tensors = patch.fill(memory.data, comparison.changes)
        verify = in_turn(copy.manifest.entries, next(self._patches), self._verify_every)
        made = PatchCopy(base=base.manifest.digest, tensors=tensors, memory=memory, nbytes=nbytes, verify=verify)
        return replace(copy, patch=made, patch_share=share, chained=True)


def in_turn(entries: Sequence[WeightEntry], number: int, every: int) -> tuple[str, ...]:
    """Return the tensors that the patch `number` has read whole: each has its turn once in `every` patches, like bytes in each."""
    total = sum(entry.nbytes for entry in entries if entry.alias_of is None)
    names, start = [], 0
    for entry in entries:
        if entry.alias_of is None and entry.nbytes:
            if start * every // total == number % every:
                names.append(entry.name)
            start += entry.nbytes
    return tuple(names)


def _alike(base: HostCopy, source: VersionSource) -> bool:
    """Return whether the two have the same tensors at the same places."""
    names = [(entry.name, entry.shape, entry.dtype, entry.alias_of) for entry in base.manifest.entries]
    own = [(entry.name, entry.shape, entry.dtype, entry.alias_of) for entry in source.entries]
    return names == own and base.layout == source.layout
