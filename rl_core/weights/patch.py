"""Patches: the bits in which two states of a model differ, without loss.

Per tensor: nothing where it did not change, ascending positions as gaps and the new values where that is smaller, else all
of it. Elements are compared by their bits, so NaN and -0.0 travel like every other value. `publisher` makes them through
`chain`, `assembly` writes them; `encode` and `apply` do both for dicts of tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rl_core.api.errors import DataError
from rl_core.messages.weights import Patch, TensorPatch
from rl_core.transports import frames
from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights import differences, words
from rl_core.weights.manifest import host_bytes

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 20
"""Elements compared at once; bounds what a comparison makes besides the patch."""
ALIGNMENT = 8
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, slots=True)
class Change:
    """What changed in one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    """Elements that differ; all when it goes whole."""
    gaps: np.ndarray | None
    """Distances of the positions; None = it goes whole."""
    values: np.ndarray
    """The new elements as unsigned integers."""

    @property
    def nbytes(self) -> int:
        """Return the room that it takes in the data of a patch."""
        gaps = 0 if self.gaps is None else _aligned(self.gaps.nbytes)
        return gaps + _aligned(self.values.nbytes)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


# --- making one ---------------------------------------------------------------------------------------------------------


def compare(
    name: str, shape: Sequence[int], dtype: str, old: np.ndarray, new: np.ndarray, place: np.ndarray | None = None
) -> tuple[int, Change | None, words.Sums]:
    """Return how many elements differ, the change that makes `new` of `old` (uint8, of one size), and the checksum of `new`.

    The change is None when nothing differs. `new` is written to `place`, which may be `old`; None = nowhere. A change that goes
    whole views `place`, or `new`.
    """
    kind = _BITS[ITEMSIZES[CODES[dtype]]]
    over = place is not None and place.ctypes.data == old.ctypes.data
    if place is not None and not over:
        np.copyto(place, new)
    count, gaps, values, sums = _differences(old.view(kind), new.view(kind), over=over)
    if not count:
        return 0, None, sums
    if gaps is not None:
        sparse = Change(name, tuple(shape), dtype, count, gaps, values)
        if sparse.nbytes < new.nbytes:
            return count, sparse, sums
    whole = (new if place is None else place).view(kind)
    return count, Change(name, tuple(shape), dtype, whole.size, None, whole), sums


def _differences(
    old: np.ndarray, new: np.ndarray, *, over: bool
) -> tuple[int, np.ndarray | None, np.ndarray, words.Sums]:
    """Return how many elements of `new` differ from `old`, the gaps of their positions, their values, and the checksum of `new`.

    Gaps are in the narrowest type that holds them; None when none does or when they and the values would be larger than `new`.
    """
    most = new.nbytes // (new.itemsize + 1)
    count = last = largest = 0
    sums = (0, 0)
    gaps: list[np.ndarray] = []
    values: list[np.ndarray] = []
    rooms = differences.Rooms(min(BLOCK, new.size), new.dtype)
    for start in range(0, new.size, BLOCK):
        before, block = old[start : start + BLOCK], new[start : start + BLOCK]
        found = differences.find(before, block, rooms, last=last - start, offset=start * new.itemsize // 4, over=over)
        sums = words.add(sums, found.sums)
        count, last, largest = count + found.number, start + found.last, max(largest, found.largest)
        if count > most:
            gaps.clear()
            values.clear()
        elif found.number:
            gaps.append(rooms.gaps[: found.number].copy())
            values.append(rooms.values[: found.number].copy())
    width = next((kind for kind in _GAPS if largest <= np.iinfo(kind).max), None)
    if not gaps or width is None or count > most:
        return count, None, new[:0], sums
    return count, np.concatenate(gaps).astype(width), np.concatenate(values), sums


def size_of(changes: Iterable[Change]) -> int:
    """Return the bytes of the data of a patch of `changes`."""
    return sum(change.nbytes for change in changes)


def fill(data: np.ndarray, changes: Iterable[Change]) -> tuple[TensorPatch, ...]:
    """Write `changes` to `data` (uint8, of `size_of` them) and return where each lies."""
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
        for part in (change.gaps, change.values):
            if part is not None:
                data[position : position + part.nbytes] = part.view(np.uint8)
                position += _aligned(part.nbytes)
    return tuple(tensors)


def encode(old: "Mapping[str, torch.Tensor]", new: "Mapping[str, torch.Tensor]") -> Patch:
    """Return the patch that makes `new` of `old`, by bits. Raises ValueError unless names, shapes and types are the same."""
    if list(old) != list(new):
        raise ValueError(f"a patch is made of two states with the same names, got {_few(old)} and {_few(new)}")
    changes = []
    for name, tensor in new.items():
        before, after = (_kind(one[name]) for one in (old, new))
        if before != after:
            raise ValueError(f"{name!r} must keep its shape and type, got {before} and {after}")
        _, change, _ = compare(name, *after, host_bytes(old[name].cpu()), host_bytes(tensor.cpu()))
        changes += [] if change is None else [change]
    data = np.zeros(size_of(changes), np.uint8)
    return Patch(tensors=fill(data, changes), data=data)


def encoded_bytes(patch: Patch) -> int:
    """Return the size of `patch` on the wire."""
    return sum(memoryview(part).nbytes for part in frames.encode(patch))


def _kind(tensor: "torch.Tensor") -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _few(names: Iterable[str]) -> list[str]:
    return sorted(names)[:5]


# --- writing one --------------------------------------------------------------------------------------------------------


def apply(target: "Mapping[str, torch.Tensor]", patch: Patch) -> None:
    """Write `patch` into the tensors of `target`; nothing is written unless all of it fits.

    Raises DataError for an unknown name, another shape or type, a position out of range, a count that is not that of the data.
    """
    read = []
    for change in by_name(patch.tensors).values():
        tensor = target.get(change.name)
        if tensor is None:
            raise DataError(f"patch must be of tensors of the model, got {change.name!r}")
        if _kind(tensor) != (tuple(change.shape), change.dtype):
            kind = _kind(tensor)
            raise DataError(
                f"{change.name!r} must be {kind[1]} {list(kind[0])} in the patch, got {change.dtype} {list(change.shape)}"
            )
        read.append((tensor, Writing.of(change, patch.data)))
    for tensor, writing in read:
        held = tensor.detach().cpu().contiguous()
        writing.write(host_bytes(held))
        if held.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(held)


@dataclass(frozen=True, slots=True)
class Writing:
    """The change of one tensor, read and checked."""

    gaps: np.ndarray | None
    """None = all elements."""
    values: np.ndarray
    """Unsigned integers."""

    @classmethod
    def of(cls, change: TensorPatch, data: np.ndarray) -> "Writing":
        """Return what `change` says, from the data of its patch. Raises DataError when it contradicts its tensor or the data."""
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
        last, rises = differences.reach(gaps)
        if not rises:
            raise DataError(f"{change.name!r} must have rising positions in a patch, got one twice")
        if last >= size:
            raise DataError(f"{change.name!r} must have positions below {size} in a patch, got {last}")
        return cls(gaps, values)

    def write(self, memory: np.ndarray, sums: words.Sums = (0, 0)) -> words.Sums:
        """Write into the bytes of the tensor (uint8), whose checksum was `sums`, and return its checksum.

        What is written is read before and after; elements that do not change are taken for proven by `sums`.
        """
        if self.gaps is None:
            return words.copy_bytes(memory, self.values.view(np.uint8))
        return words.add(sums, differences.write(memory.view(self.values.dtype), self.gaps, self.values))


def _part(change: TensorPatch, data: np.ndarray, start: int, itemsize: int) -> np.ndarray:
    """Return `change.count` unsigned integers of `itemsize` bytes at `start`."""
    end = start + change.count * itemsize
    if start < 0 or start % ALIGNMENT or end > data.size:
        raise DataError(
            f"{change.name!r} must lie inside the {data.size} bytes of its patch, aligned to {ALIGNMENT}, got {start} to {end}"
        )
    return data[start:end].view(_BITS[itemsize])


def by_name(tensors: Iterable[TensorPatch]) -> dict[str, TensorPatch]:
    """Return the changes of a patch by name. Raises DataError for a name that comes twice."""
    found: dict[str, TensorPatch] = {}
    for change in tensors:
        if found.setdefault(change.name, change) is not change:
            raise DataError(f"patch must change a tensor once, got {change.name!r} twice")
    return found
