"""Versions and patches of weights made from dicts of tensors, for tests and benchmarks."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from rl_core.messages.weights import TensorPatch
from rl_core.weights import patch
from rl_core.weights.bucket import DEFAULT_BUCKET_BYTES, Layout
from rl_core.weights.manifest import WeightEntry, WeightManifest, checksum, host_bytes, wire_dtype
from rl_core.weights.version_source import SourceBucket, SourceEntry


def _memory(tensor):
    """Return what two names of one memory have in common."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class StateSource:
    """A mapping of whole tensors as a version. Names of one memory are tied. For stand-alone use: tests, benchmarks."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        """`dtype`: type of floating tensors on the wire; None = their own. Raises ValueError for no tensors."""
        self._tensors = tensors
        found: dict[tuple[object, ...], str] = {}
        entries = []
        for name, tensor in tensors.items():
            first = found.setdefault(_memory(tensor), name) if tensor.numel() else name
            wire = wire_dtype(tensor, dtype)
            entries.append(SourceEntry(name, tuple(tensor.shape), wire, first if first != name else None))
        self.entries: tuple[SourceEntry, ...] = tuple(entries)
        self.layout = Layout.of(self.entries, bucket_bytes)

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets on `device`."""
        for place in self.layout.buckets:
            members = [self.entries[index] for index in place.entries]
            tensors = [self._tensors[one.name].detach().to(device, getattr(torch, one.dtype)) for one in members]
            yield SourceBucket(place, tuple(tensors))


def build_manifest(tensors, *, version, epoch, dtype=None):
    """Return the manifest of a dict of tensors, as `HostCopies.write` makes it."""
    source = StateSource(tensors, dtype=dtype)
    entries = []
    for entry in source.entries:
        sent = tensors[entry.name].detach().to(getattr(torch, entry.dtype))
        entries.append(WeightEntry(entry.name, entry.shape, entry.dtype, entry.nbytes, checksum(sent), entry.alias_of))
    return WeightManifest(version=version, epoch=epoch, entries=tuple(entries))


class Patch(NamedTuple):
    """Changes of a model and their data (uint8)."""

    tensors: tuple[TensorPatch, ...]
    data: np.ndarray


def make_patch(old, new) -> Patch:
    """Return the patch from one dict of tensors to another with the same names, shapes and types."""
    changes = []
    for name, tensor in new.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        _, change, _ = patch.compare(name, tuple(tensor.shape), dtype, host_bytes(old[name]), host_bytes(tensor))
        changes += [] if change is None else [change]
    data = np.zeros(patch.size_of(changes), np.uint8)
    return Patch(patch.fill(data, changes), data)


def apply_patch(target, made: Patch) -> None:
    """Write a patch into contiguous tensors; nothing is written unless every change is valid."""
    changes = [
        (name, patch.DecodedChange.of(change, made.data)) for name, change in patch.by_name(made.tensors).items()
    ]
    for name, change in changes:
        change.write(host_bytes(target[name]))
