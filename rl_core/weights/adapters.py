"""Versions of a model with adapters (LoRA): a frozen base and the adapters on top of it. After the first version only adapters are sent.

The manifest lists both, so that its digest proves the base and the adapters of a version. The publisher writes the base to host memory
once and overwrites the adapters there. A version is also offered as a patch that holds all adapters and applies to every version of the
same base (`WeightManifest.base_digest`). A receiver that has the base verifies the adapters and, at each version, another part of the base.
All other receivers get the whole version.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rl_core.api.job import RLJobSpec
from rl_core.weights import patch
from rl_core.weights.bucket import Layout
from rl_core.weights.host_copy import HostCopies, HostCopy, PatchCopy, write_tensor
from rl_core.weights.manifest import WeightManifest, is_adapter_name
from rl_core.weights.patch_encoder import tensors_to_verify
from rl_core.weights.version_source import SourceBucket, SourceEntry, VersionSource

if TYPE_CHECKING:
    import torch


def sends_adapters(spec: RLJobSpec) -> bool:
    """Return whether the job `spec` sends adapters over a base. Other jobs with adapters send merged weights."""
    point_to_point = spec.weights.syncer == "bucket" and spec.weights.transport in ("auto", "zmq")
    return spec.model.lora is not None and point_to_point


class AdapterSource:
    """A `VersionSource` of tensors that are complete on rank 0, such as adapters: no gathering is needed."""

    def __init__(self, tensors: "dict[str, torch.Tensor]", *, bucket_bytes: int) -> None:
        """Offer `tensors` by name, in their types."""
        self.entries: Sequence[SourceEntry] = [
            SourceEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        ]
        self.layout = Layout.of(self.entries, bucket_bytes)
        self._tensors = tensors

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets on `device`."""
        for place in self.layout.buckets:
            names = [self.entries[index].name for index in place.entries]
            yield SourceBucket(place, tuple(self._tensors[name].detach().to(device) for name in names))

    def finish(self) -> None:
        """Do nothing: nothing is left to gather."""


class AdapterEncoder:
    """Writes versions to host memory with `copies`: base and adapters, or new adapters beside the base of the previous version.

    Only one thread may write at a time.
    """

    def __init__(self, copies: HostCopies, *, verify_every: int) -> None:
        """`verify_every`: within this many versions, a receiver reads and checks every tensor of its base once."""
        self._copies, self._verify_every = copies, verify_every
        self._last: HostCopy | None = None
        """The version that was written last; this object holds it."""
        self._patches = itertools.count(1)

    @property
    def has_base(self) -> bool:
        """Return whether a source may have adapters only."""
        return self._last is not None

    def write(self, source: VersionSource, *, version: int, epoch: int, device: str = "cpu") -> HostCopy:
        """Return a new copy of `source`, which has a base and adapters, or adapters only if `has_base`.

        Raises ValueError if the adapters are not those of the base, and the errors of `HostCopies.write`.
        """
        previous, self._last = self._last, None
        if previous is not None and previous.patch is not None:
            self._copies.free(previous.patch.memory)
        try:
            if previous is not None and all(is_adapter_name(entry.name) for entry in source.entries):
                copy = self._write_adapters(previous, source, version=version, epoch=epoch, device=device)
            else:
                copy = self._copies.write(source, version=version, epoch=epoch, device=device)
        except BaseException:
            if previous is not None:
                self._copies.drop(previous, self)
            raise
        self._copies.hold(copy, self)
        if previous is not None and copy.memory is not previous.memory:
            self._copies.drop(previous, self)
        self._last = copy
        return copy

    def _write_adapters(
        self, previous: HostCopy, source: VersionSource, *, version: int, epoch: int, device: str
    ) -> HostCopy:
        entries = {entry.name: entry for entry in previous.manifest.entries if is_adapter_name(entry.name)}
        offered = {entry.name: (entry.shape, entry.dtype) for entry in source.entries}
        if offered != {name: (entry.shape, entry.dtype) for name, entry in entries.items()}:
            raise ValueError(f"adapters must be the {len(entries)} of the first version, got {len(offered)} others")
        memory = self._copies.overwritable(previous)
        starts = {previous.manifest.entries[index].name: start for index, start in previous.layout.starts.items()}
        sums, changes = {}, []
        for bucket in source.buckets(device):
            for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                entry = source.entries[index]
                place = memory.data[starts[entry.name] : starts[entry.name] + entry.nbytes]
                sums[entry.name] = write_tensor(place, tensor, entry)
                values = place.view(np.uint32)
                changes.append(patch.TensorChange(entry.name, entry.shape, entry.dtype, values.size, None, values))
        updated_entries = (
            replace(entry, checksum=sums.get(entry.name, entry.checksum)) for entry in previous.manifest.entries
        )
        manifest = WeightManifest(version=version, epoch=epoch, entries=tuple(updated_entries))
        nbytes = patch.size_of(changes)
        patch_memory = self._copies.allocate(nbytes)
        tensors = patch.fill(patch_memory.data, changes)
        base = [entry for entry in manifest.entries if not is_adapter_name(entry.name)]
        verify = tensors_to_verify(base, next(self._patches), self._verify_every)
        patch_copy = PatchCopy(
            base=manifest.base_digest, tensors=tensors, memory=patch_memory, nbytes=nbytes, verify=verify
        )
        return HostCopy(manifest, previous.layout, memory, patch=patch_copy)
