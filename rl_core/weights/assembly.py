"""Turns the pieces of a host copy, as any transport brings them, into verified tensors.

Pieces are (position, bytes) in rising order; they may hold many tensors or a part of one. A tensor with a destination is
written there while its checksum is taken, one pass over memory; the others are handed out, each only after its checksum
held. Used by the receiver, in its thread.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rl_core.api.errors import DataError
from rl_core.transports.dtypes import CODES, tensor_view
from rl_core.weights import words
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.manifest import WeightEntry, WeightManifest, checksum, host_bytes

if TYPE_CHECKING:
    import torch

Piece = tuple[int, np.ndarray]
"""(position in the host copy, uint8 bytes); starts and ends inside a tensor fall on whole 32-bit words."""


class Assembly:
    """One transfer of `manifest`. `bad` names the tensors whose checksum differed; they are never handed out."""

    def __init__(
        self,
        manifest: WeightManifest,
        layout: Layout,
        *,
        destinations: Mapping[str, "torch.Tensor"],
        wanted: Container[str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`wanted`: names to hand out besides those with a destination. `check` runs per tensor and raises to stop."""
        self.bad: list[str] = []
        self.touched = False
        """Whether anything of the target may have changed."""
        self._partial: tuple[np.ndarray, int, words.Sums] | None = None
        """Of the tensor under way: its memory, bytes so far, sums so far."""
        self.manifest, self.layout = manifest, layout
        self._entries = manifest.entries
        self._wanted, self._check = wanted, check
        self._aliases: dict[str, list[str]] = {}
        for entry in manifest.entries:
            if entry.alias_of is not None:
                self._aliases.setdefault(entry.alias_of, []).append(entry.name)
        self._places = {
            name: host_bytes(tensor)
            for name, tensor in destinations.items()
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    def tensors(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield (name, tensor) of what has no destination; valid as long as `pieces` are. Raises DataError for a gap."""
        order = [(start, self._entries[index]) for index, start in self.layout.starts.items()]
        cursor, end = 0, 0
        for position, data in pieces:
            if position < end:
                raise DataError(f"weights must come in order: expected byte {end} or later, got {position}")
            end = position + data.size
            while cursor < len(order) and order[cursor][0] + order[cursor][1].nbytes <= end:
                start, entry = order[cursor]
                self._check()
                self._reach(entry, start, position)
                yield from self._whole(entry, data[max(start - position, 0) : start + entry.nbytes - position])
                cursor += 1
            if cursor < len(order) and order[cursor][0] < end:
                start, entry = order[cursor]
                self._check()
                self._reach(entry, start, position)
                self._part(entry, data[max(start - position, 0) :])
        if cursor < len(order):
            raise DataError(
                f"weights ended at byte {end} of {self.layout.nbytes}, before the end of {order[cursor][1].name!r}"
            )

    def device_tensors(self, buckets: Iterable[tuple[Bucket, "torch.Tensor"]]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield (name, tensor) of whole buckets (uint8) in an accelerator's memory, checked and left there."""
        import torch

        self._places = {}
        for bucket, buffer in buckets:
            for member, offset in zip(bucket.entries, bucket.offsets, strict=True):
                self._check()
                entry = self._entries[member]
                flat = buffer[offset : offset + entry.nbytes]
                if checksum(flat) != entry.checksum:
                    self.bad.append(entry.name)
                    continue
                self.touched = True
                tensor = flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)
                for name in (entry.name, *self._aliases.get(entry.name, ())):
                    if name in self._wanted:
                        yield name, tensor

    def _reach(self, entry: WeightEntry, start: int, position: int) -> None:
        so_far = self._partial[1] if self._partial is not None else 0
        if position > start + so_far:
            raise DataError(
                f"weights must come without gaps: {entry.name!r} misses bytes {start + so_far} to {position}"
            )

    def _part(self, entry: WeightEntry, data: np.ndarray) -> None:
        if self._partial is None:
            place = self._places.get(entry.name)
            self._partial = (np.empty(entry.nbytes, np.uint8) if place is None else place, 0, (0, 0))
        memory, done, sums = self._partial
        if done % 4:
            raise DataError(f"pieces of {entry.name!r} must be cut at whole 32-bit words, got a cut at byte {done}")
        self.touched |= entry.name in self._places
        added = words.copy_bytes(memory[done : done + data.size], data, offset=done // 4)
        self._partial = (memory, done + data.size, words.add(sums, added))

    def _whole(self, entry: WeightEntry, data: np.ndarray) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Finish `entry` with its last (or only) bytes."""
        place = self._places.get(entry.name)
        if self._partial is not None:
            self._part(entry, data)
            memory, _, sums = self._partial
            self._partial = None
        elif place is not None:
            self.touched = True
            memory, sums = place, words.copy_bytes(place, data)
        else:
            memory, sums = data, words.sum_bytes(data)
        if sums != entry.checksum:
            self.bad.append(entry.name)
            return
        names = (entry.name, *self._aliases.get(entry.name, ()))
        for name in names:
            other = self._places.get(name)
            if other is not None and other is not memory and other.ctypes.data != memory.ctypes.data:
                np.copyto(other, memory)
        handed = [name for name in names if name not in self._places and name in self._wanted]
        if handed:
            self.touched = True
            tensor = tensor_view(memory.data, CODES[entry.dtype], entry.shape, copy=False)
            for name in handed:
                yield name, tensor
