"""Patches: the elements in which two versions of a model differ, compared bit by bit.

For each tensor that changed, a patch holds either the ascending positions (as gaps) and new values of the changed elements, or the
whole tensor if that is smaller. Because bits are compared, NaN payloads and the sign of zero are kept. `patch_encoder` makes
patches for the publisher; `assembly` applies them at a receiver.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rl_core.api.errors import DataError
from rl_core.messages.weights import TensorPatch
from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights import checksums, delta

BLOCK = 1 << 20
"""Number of elements compared at once. It limits the temporary arrays."""
ALIGNMENT = 8
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The changed elements of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    """Number of elements in `values`."""
    gaps: np.ndarray | None
    """Distance of each position from the one before it; None if all elements are included."""
    values: np.ndarray
    """The new values as unsigned integers of the size of an element."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that this change takes in the data of a patch, padding included."""
        gaps = 0 if self.gaps is None else _aligned(self.gaps.nbytes)
        return gaps + _aligned(self.values.nbytes)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


# --- making a patch ---------------------------------------------------------------------------------------------------------


def compare(
    name: str, shape: Sequence[int], dtype: str, old: np.ndarray, new: np.ndarray, place: np.ndarray | None = None
) -> tuple[int, TensorChange | None, checksums.Checksum]:
    """Return (number of elements that differ, the change that turns `old` into `new`, checksum of `new`).

    `old` and `new` are the bytes (uint8) of a tensor with `shape` and `dtype`. The change is None if no element differs. If `place` is
    given, `new` is copied to it; `place` may be the same memory as `old`. A change that holds the whole tensor is a view of `place`,
    or of `new` if there is no `place`.
    """
    kind = _BITS[ITEMSIZES[CODES[dtype]]]
    overwrite = place is not None and place.ctypes.data == old.ctypes.data
    if place is not None and not overwrite:
        np.copyto(place, new)
    count, gaps, values, sums = _differences(old.view(kind), new.view(kind), overwrite=overwrite)
    if not count:
        return 0, None, sums
    if gaps is not None:
        sparse = TensorChange(name, tuple(shape), dtype, count, gaps, values)
        if sparse.nbytes < new.nbytes:
            return count, sparse, sums
    all_values = (new if place is None else place).view(kind)
    return count, TensorChange(name, tuple(shape), dtype, all_values.size, None, all_values), sums


def _differences(
    old: np.ndarray, new: np.ndarray, *, overwrite: bool
) -> tuple[int, np.ndarray | None, np.ndarray, checksums.Checksum]:
    """Return (number of elements that differ, gaps of their positions, their new values, checksum of `new`).

    Gaps have the narrowest type that holds them. They are None if no type does, or if gaps and values would be larger than `new`.
    """
    max_changes = new.nbytes // (new.itemsize + 1)
    count = last = largest = 0
    sums = (0, 0)
    gaps: list[np.ndarray] = []
    values: list[np.ndarray] = []
    buffers = delta.DeltaBuffers(min(BLOCK, new.size), new.dtype)
    for start in range(0, new.size, BLOCK):
        old_block, block = old[start : start + BLOCK], new[start : start + BLOCK]
        result = delta.find(
            old_block, block, buffers, last=last - start, offset=start * new.itemsize // 4, overwrite=overwrite
        )
        sums = checksums.add(sums, result.checksum)
        count, last, largest = count + result.num_changed, start + result.last, max(largest, result.largest_gap)
        if count > max_changes:
            gaps.clear()
            values.clear()
        elif result.num_changed:
            gaps.append(buffers.gaps[: result.num_changed].copy())
            values.append(buffers.values[: result.num_changed].copy())
    width = next((kind for kind in _GAPS if largest <= np.iinfo(kind).max), None)
    if not gaps or width is None or count > max_changes:
        return count, None, new[:0], sums
    return count, np.concatenate(gaps).astype(width), np.concatenate(values), sums


def size_of(changes: Iterable[TensorChange]) -> int:
    """Return the size of the data of a patch that holds `changes`, bytes."""
    return sum(change.nbytes for change in changes)


def fill(data: np.ndarray, changes: Iterable[TensorChange]) -> tuple[TensorPatch, ...]:
    """Write `changes` into `data` (uint8, `size_of(changes)` bytes) and return the position of each."""
    tensors, position = [], 0
    for change in changes:
        width = 0 if change.gaps is None else change.gaps.itemsize
        tensors.append(
            TensorPatch(
                name=change.name,
                shape=change.shape,
                dtype=change.dtype,
                count=change.count,
                gap_bytes=width,
                start=position,
            )
        )
        for array in (change.gaps, change.values):
            if array is not None:
                data[position : position + array.nbytes] = array.view(np.uint8)
                position += _aligned(array.nbytes)
    return tuple(tensors)


# --- applying a patch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodedChange:
    """The change of one tensor, decoded from a patch and checked."""

    gaps: np.ndarray | None
    """Distance of each position from the one before it; None for all elements."""
    values: np.ndarray
    """The new values as unsigned integers of the size of an element."""

    @classmethod
    def of(cls, change: TensorPatch, data: np.ndarray) -> "DecodedChange":
        """Return the decoded `change`, whose bytes are in `data`.

        Raises DataError if it is inconsistent with the shape of the tensor or the size of the data.
        """
        if change.dtype not in CODES:
            raise DataError(f"{change.name!r} must have a type of the wire in a patch, got {change.dtype!r}")
        size, itemsize = prod(change.shape), ITEMSIZES[CODES[change.dtype]]
        if change.gap_bytes not in (0, *(np.dtype(kind).itemsize for kind in _GAPS)):
            raise DataError(f"{change.name!r} must have gaps of 0, 1, 2 or 4 bytes in a patch, got {change.gap_bytes}")
        if not 0 < change.count <= size or (not change.gap_bytes and change.count != size):
            raise DataError(f"{change.name!r} has {size} elements, a patch cannot change {change.count} of them")
        gaps_end = change.start + change.count * change.gap_bytes
        values = _part(change, data, _aligned(gaps_end), itemsize)
        if not change.gap_bytes:
            return cls(None, values)
        gaps = _part(change, data, change.start, change.gap_bytes)
        last, ascending = delta.last_position(gaps)
        if not ascending:
            raise DataError(f"{change.name!r} must have rising positions in a patch, got one twice")
        if last >= size:
            raise DataError(f"{change.name!r} must have positions below {size} in a patch, got {last}")
        return cls(gaps, values)

    def write(self, memory: np.ndarray, sums: checksums.Checksum = (0, 0)) -> checksums.Checksum:
        """Write the change into the bytes of the tensor (uint8) and return the new checksum; `sums` is the checksum before.

        The checksum is updated from the elements that are overwritten; all other elements are covered by `sums` and are not read.
        """
        if self.gaps is None:
            return checksums.copy_bytes(memory, self.values.view(np.uint8))
        return checksums.add(sums, delta.write(memory.view(self.values.dtype), self.gaps, self.values))


def _part(change: TensorPatch, data: np.ndarray, start: int, itemsize: int) -> np.ndarray:
    """Return `change.count` unsigned integers of `itemsize` bytes that begin at byte `start` of `data`."""
    end = start + change.count * itemsize
    if start < 0 or start % ALIGNMENT or end > data.size:
        raise DataError(
            f"{change.name!r} must lie inside the {data.size} bytes of its patch, aligned to {ALIGNMENT}, got {start} to {end}"
        )
    return data[start:end].view(_BITS[itemsize])


def by_name(tensors: Iterable[TensorPatch]) -> dict[str, TensorPatch]:
    """Return the changes of a patch by tensor name. Raises DataError for a name that occurs twice."""
    changes: dict[str, TensorPatch] = {}
    for change in tensors:
        if changes.setdefault(change.name, change) is not change:
            raise DataError(f"patch must change a tensor once, got {change.name!r} twice")
    return changes
