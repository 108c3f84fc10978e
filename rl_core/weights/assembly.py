"""Verifies the bytes of a version, as any transport delivers them, or of a patch, and turns them into tensors.

Pieces are (position, bytes) in ascending order; a piece may contain many tensors or a part of one. A tensor with a destination is written
there while its checksum is computed, in one pass over memory. The others are yielded, each only after its checksum matched. A patch is
applied to the previous version: in the destinations, and in the retained bytes of tensors without one. Used by the receiver, in its thread.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rl_core.api.errors import DataError
from rl_core.messages.weights import PatchSource
from rl_core.transports.dtypes import CODES, tensor_view
from rl_core.weights import checksums, patch
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.manifest import WeightEntry, WeightManifest, checksum, host_bytes, is_adapter_name

if TYPE_CHECKING:
    import torch

Piece = tuple[int, np.ndarray]
"""(position in the host copy, uint8 bytes); starts and ends inside a tensor fall on whole 32-bit words."""


def writable_bytes(destinations: "Mapping[str, torch.Tensor]") -> dict[str, np.ndarray]:
    """Return byte views (uint8) of those `destinations` that can be written in place: contiguous tensors in host memory."""
    return {
        name: host_bytes(tensor)
        for name, tensor in destinations.items()
        if tensor.device.type == "cpu" and tensor.is_contiguous()
    }


class Assembly:
    """Receives and verifies one version.

    `bad` names the tensors whose checksum differed; they are never yielded.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        layout: Layout,
        *,
        destinations: Mapping[str, "torch.Tensor"],
        wanted: Container[str],
        check: Callable[[], None] = lambda: None,
        retained: dict[str, np.ndarray] | None = None,
        base: WeightManifest | None = None,
        proven_later: Container[str] = (),
    ) -> None:
        """Prepare for the version of `manifest`, whose bytes are arranged by `layout`.

        - `destinations`: tensors that are written in place, by name.
        - `wanted`: names that may be yielded; a tensor with a destination is not.
        - `check`: called for each tensor; raises to stop the transfer.
        - `retained`: bytes of the previous version of tensors without a destination, by name; it is updated to this version. None: none are
          kept.
        - `base`: manifest of the verified version in memory, to which a patch can apply. None: there is none.
        - `proven_later`: tensors without a destination whose bytes the caller verifies after they were loaded.
        """
        self.bad: list[str] = []
        self.touched = False
        """Whether memory of the target may have been changed."""
        self._proven_later = proven_later
        self._partial: tuple[np.ndarray, int, checksums.Checksum] | None = None
        """(memory, number of bytes so far, checksum so far) of the tensor that is being received."""
        self.manifest, self.layout = manifest, layout
        self._entries = manifest.entries
        self._wanted, self._check = wanted, check
        self._aliases: dict[str, list[str]] = {}
        for entry in manifest.entries:
            if entry.alias_of is not None:
                self._aliases.setdefault(entry.alias_of, []).append(entry.name)
        self._destinations = writable_bytes(destinations)
        self._retained, self._base = retained, base
        self._memory = {**(retained or {}), **self._destinations}
        """Memory to which the bytes of a tensor are written, by the name under which the tensor is sent."""

    @property
    def is_needed_here(self) -> bool:
        """Return whether the bytes must reach this process, because it keeps them for later patches or loads adapters itself."""
        return self._retained is not None or bool(self.manifest.base_digest)

    def _sizes_without_destination(self) -> dict[str, int]:
        """Return name -> size in bytes of the tensors that are sent and have no destination."""
        entries = (entry for entry in self._entries if entry.alias_of is None)
        return {entry.name: entry.nbytes for entry in entries if entry.name not in self._destinations}

    def _make_room(self, retained: dict[str, np.ndarray]) -> None:
        """Allocate memory in `retained` for the tensors without a destination, and remove all others."""
        sizes = self._sizes_without_destination()
        for name in list(retained):
            if sizes.get(name) != retained[name].size:
                del retained[name]
        for name, size in sizes.items():
            if name not in retained:
                retained[name] = np.empty(size, np.uint8)
        self._memory = {**retained, **self._destinations}

    def tensors(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Verify all tensors, and write those with a destination. Yield (name, tensor) of the other `wanted` names.

        The work is done during the iteration. A tensor with another checksum than in the manifest is not yielded, and its name is added to `bad`.
        A yielded tensor may be a view of a piece, and is then valid as long as the piece. Raises DataError when bytes are missing or not in order.
        """
        if self._retained is not None:
            self._make_room(self._retained)
        order = [(start, self._entries[index]) for index, start in self.layout.starts.items()]
        cursor, end = 0, 0
        for position, data in pieces:
            if position < end:
                raise DataError(f"weights must come in order: expected byte {end} or later, got {position}")
            end = position + data.size
            while cursor < len(order) and order[cursor][0] + order[cursor][1].nbytes <= end:
                start, entry = order[cursor]
                self._check()
                self._check_contiguous(entry, start, position)
                yield from self._finish_tensor(entry, data[max(start - position, 0) : start + entry.nbytes - position])
                cursor += 1
            if cursor < len(order) and order[cursor][0] < end:
                start, entry = order[cursor]
                self._check()
                self._check_contiguous(entry, start, position)
                self._add_part(entry, data[max(start - position, 0) :])
        if cursor < len(order):
            raise DataError(
                f"weights ended at byte {end} of {self.layout.nbytes}, before the end of {order[cursor][1].name!r}"
            )

    def device_tensors(self, buckets: Iterable[tuple[Bucket, "torch.Tensor"]]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Verify buckets of whole tensors (uint8) in the memory of an accelerator, and yield (name, tensor) without copying them."""
        import torch

        self._destinations = {}
        for bucket, buffer in buckets:
            for member, offset in zip(bucket.entries, bucket.offsets, strict=True):
                self._check()
                entry = self._entries[member]
                flat = buffer[offset : offset + entry.nbytes]
                if entry.name not in self._proven_later and checksum(flat) != entry.checksum:
                    self.bad.append(entry.name)
                    continue
                self.touched = True
                tensor = flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)
                for name in (entry.name, *self._aliases.get(entry.name, ())):
                    if name in self._wanted:
                        yield name, tensor

    def patched(self, source: PatchSource, data: np.ndarray) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Apply the patch `source`, whose bytes are `data`, and yield (name, tensor) of each `wanted` name without a destination.

        Unchanged tensors are yielded too, unless the patch consists of adapters: then only these are. The new checksum of a tensor is computed
        from its old one and the changed elements, so that only these are read. The tensors in `source.verify` are read as a whole. Raises
        DataError if this is no patch of the version in memory.
        """
        if self._base is None or source.base not in (self._base.digest, self._base.base_digest):
            raise DataError(f"patch must be of the version in memory, got one of {source.base}")
        if source.base == self._base.base_digest:
            yield from self._adapters(source, data)
            return
        if self._retained is None or self._retained.keys() != self._sizes_without_destination().keys():
            raise DataError("patch must find the tensors where the version before it left them, some are not there")
        base_checksums = {entry.name: entry.checksum for entry in self._base.entries}
        verify = frozenset(source.verify)
        changes = patch.by_name(source.tensors)
        for entry in self._entries:
            if entry.alias_of is not None:
                continue
            self._check()
            memory = self._memory[entry.name]
            change = changes.pop(entry.name, None)
            if entry.name not in base_checksums:
                raise DataError(f"patch must be of tensors of the version in memory, got {entry.name!r}")
            sums = base_checksums[entry.name]
            if change is not None:
                if (change.shape, change.dtype) != (entry.shape, entry.dtype):
                    raise DataError(
                        f"{entry.name!r} must be {entry.dtype} {list(entry.shape)} in a patch, got {change.dtype} {list(change.shape)}"
                    )
                decoded = patch.DecodedChange.of(change, data)
                self.touched = True
                sums = decoded.write(memory, sums)
            if entry.name in verify:
                sums = checksums.sum_bytes(memory)
            yield from self._yield_verified(entry, memory, sums)
        if changes:
            raise DataError(f"patch must be of tensors of the manifest, got {next(iter(changes))!r}")

    def _adapters(self, source: PatchSource, data: np.ndarray) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield the adapters of `source`, which are whole tensors in `data`. The base is in the engine already and is not changed.

        Tensors of the base that are named in `source.verify` are read from memory and verified. Raises DataError if the adapters are not
        those of the manifest, or belong to another base than the one in memory.
        """
        assert self._base is not None
        if self.manifest.base_digest != source.base:
            raise DataError(f"adapters must be of the base in memory, {source.base}, got {self.manifest.base_digest}")
        changes = patch.by_name(source.tensors)
        for entry in self._entries:
            if not is_adapter_name(entry.name):
                continue
            self._check()
            change = changes.pop(entry.name, None)
            if change is None or (change.shape, change.dtype, change.gap_bytes) != (entry.shape, entry.dtype, 0):
                raise DataError(
                    f"adapter {entry.name!r} must come as a whole, {entry.dtype} {list(entry.shape)}, got {change}"
                )
            values = patch.DecodedChange.of(change, data).values.view(np.uint8)
            yield from self._finish_tensor(entry, values)
        if changes:
            raise DataError(f"adapters must be of the manifest, got {next(iter(changes))!r}")
        verify = self._memory.keys() & set(source.verify)
        for entry in (entry for entry in self._entries if entry.name in verify):
            self._check()
            if checksums.sum_bytes(self._memory[entry.name]) != entry.checksum:
                self.bad.append(entry.name)

    def _check_contiguous(self, entry: WeightEntry, start: int, position: int) -> None:
        so_far = self._partial[1] if self._partial is not None else 0
        if position > start + so_far:
            raise DataError(
                f"weights must come without gaps: {entry.name!r} misses bytes {start + so_far} to {position}"
            )

    def _add_part(self, entry: WeightEntry, data: np.ndarray) -> None:
        if self._partial is None:
            place = self._memory.get(entry.name)
            self._partial = (np.empty(entry.nbytes, np.uint8) if place is None else place, 0, (0, 0))
        memory, offset, sums = self._partial
        if offset % 4:
            raise DataError(f"pieces of {entry.name!r} must be cut at whole 32-bit words, got a cut at byte {offset}")
        self.touched |= entry.name in self._memory
        added = checksums.copy_bytes(memory[offset : offset + data.size], data, offset=offset // 4)
        self._partial = (memory, offset + data.size, checksums.add(sums, added))

    def _finish_tensor(self, entry: WeightEntry, data: np.ndarray) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Complete the tensor of `entry` with its last (or only) bytes."""
        place = self._memory.get(entry.name)
        if self._partial is not None:
            self._add_part(entry, data)
            memory, _, sums = self._partial
            self._partial = None
        elif place is not None:
            self.touched = True
            memory, sums = place, checksums.copy_bytes(place, data)
        elif entry.name in self._proven_later:
            memory, sums = data, entry.checksum
        else:
            memory, sums = data, checksums.sum_bytes(data)
        yield from self._yield_verified(entry, memory, sums)

    def _yield_verified(
        self, entry: WeightEntry, memory: np.ndarray, sums: checksums.Checksum | None
    ) -> Iterator[tuple[str, "torch.Tensor"]]:
        """If the checksum `sums` is that of the manifest, copy `memory` to the tied names of `entry` and yield the tensors."""
        if sums != entry.checksum:
            self.bad.append(entry.name)
            return
        names = (entry.name, *self._aliases.get(entry.name, ()))
        for name in names:
            destination = self._destinations.get(name)
            if destination is not None and destination is not memory and destination.ctypes.data != memory.ctypes.data:
                np.copyto(destination, memory)
        yielded_names = [name for name in names if name not in self._destinations and name in self._wanted]
        if yielded_names:
            self.touched = True
            tensor = tensor_view(memory.data, CODES[entry.dtype], entry.shape, copy=False)
            for name in yielded_names:
                yield name, tensor
