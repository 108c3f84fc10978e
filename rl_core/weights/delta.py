"""Finds the elements in which two states of a tensor differ, and writes such elements into a tensor.

Positions are stored as gaps: the distance of each position from the one before it. The kernels are compiled under the same
condition as those of `checksums`; otherwise numpy computes the same result in several passes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rl_core.weights import checksums

WORD = 8
"""Number of bytes that are compared in one operation."""


class DeltaBuffers:
    """Output arrays of `find`, reused by every pass."""

    def __init__(self, size: int, kind: "np.dtype[Any]") -> None:
        """`size`: maximum number of elements of a pass; `kind`: unsigned integer type with the size of an element."""
        self.gaps = np.empty(size, np.uint32)
        self.values = np.empty(size, kind)


class Delta(NamedTuple):
    """Result of one pass of `find`. The gaps and values are in the `DeltaBuffers`."""

    num_changed: int
    """Number of elements that differ: as many gaps and values are in the buffers."""
    largest_gap: int
    """Largest gap. It is correct even if a gap does not fit into the 32 bits of the buffer."""
    last: int
    """Position of the last difference; the argument `last` if there is none."""
    checksum: checksums.Checksum
    """Checksum of the new state."""


def find(old: np.ndarray, new: np.ndarray, buffers: DeltaBuffers, *, last: int, offset: int, overwrite: bool) -> Delta:
    """Compare `new` with `old` (unsigned integers of equal size and type) and compute the checksum of `new`.

    Gaps and values of the elements that differ are written to `buffers`. `last`: position of the previous difference relative to
    this slice (negative if it is in an earlier slice); the first gap is counted from it. `offset`: index of the first 32-bit word
    of the slice in the tensor. `overwrite`: also write the new values into `old`.
    """
    if not _compiled(new):
        return _find_numpy(old, new, buffers, 0, last=last, offset=offset, overwrite=overwrite)
    elements_per_word = WORD // new.itemsize
    aligned_size = new.size // elements_per_word * elements_per_word
    body = new[:aligned_size]
    count, largest, last, first, second = _finder(new.itemsize)(
        old[:aligned_size].view(np.uint64),
        body.view(np.uint64),
        body.view(np.uint32),
        buffers.gaps,
        buffers.values,
        last,
        np.uint64(offset),
        overwrite,
    )
    result = Delta(count, largest, last, (int(first), int(second)))
    if aligned_size == new.size:
        return result
    tail = _find_numpy(
        old[aligned_size:],
        new[aligned_size:],
        buffers,
        count,
        last=last - aligned_size,
        offset=offset + body.nbytes // 4,
        overwrite=overwrite,
    )
    return Delta(
        count + tail.num_changed,
        max(largest, tail.largest_gap),
        tail.last + aligned_size,
        checksums.add(result.checksum, tail.checksum),
    )


def _find_numpy(
    old: np.ndarray, new: np.ndarray, buffers: DeltaBuffers, start: int, *, last: int, offset: int, overwrite: bool
) -> Delta:
    """Write the differences into `buffers`, beginning at index `start`."""
    sums = checksums.sum_bytes(new.view(np.uint8), offset=offset)
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return Delta(0, 0, last, sums)
    gaps = np.diff(positions, prepend=last)
    end = start + positions.size
    buffers.gaps[start:end] = gaps
    buffers.values[start:end] = new[positions]
    if overwrite:
        old[positions] = new[positions]
    return Delta(positions.size, int(gaps.max()), int(positions[-1]), sums)


def last_position(gaps: np.ndarray) -> tuple[int, bool]:
    """Return (last position, whether the positions are strictly ascending). The positions are the running sums of `gaps`."""
    if _compiled(gaps):
        last, smallest = _reacher(gaps.itemsize)(gaps)
        return int(last), smallest > 0
    return int(gaps.sum(dtype=np.uint64)), bool(gaps[1:].all())


def write(memory: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> checksums.Checksum:
    """Write `values` into `memory` (unsigned integers of one type) at the positions given by `gaps`; return the change of its checksum.

    The change is computed from the elements read at those positions before and after the write. The caller has checked that the
    positions are strictly ascending and inside `memory`.
    """
    if memory.itemsize <= 4 and _compiled(memory):
        first, second = _writer(gaps.itemsize, memory.itemsize)(gaps, values, memory)
        return int(first), int(second)
    data = memory.view(np.uint8)
    old_checksum = checksums.sum_bytes(data)
    memory[np.cumsum(gaps, dtype=np.int64)] = values
    return checksums.subtract(checksums.sum_bytes(data), old_checksum)


def _compiled(data: np.ndarray) -> bool:
    return checksums.should_compile(data.nbytes) and checksums.are_compiled()


@functools.cache
def _finder(itemsize: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_find

    return make_find(itemsize)


@functools.cache
def _reacher(gap_bytes: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_gap_check

    return make_gap_check(gap_bytes)


@functools.cache
def _writer(gap_bytes: int, itemsize: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_write

    return make_write(gap_bytes, itemsize)
