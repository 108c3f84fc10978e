"""One pass over two states of a tensor, and the writing of what differs; compiled like the checksums of `words`.

Where those are not loaded numpy does the same in several passes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rl_core.weights import words

WORD = 8
"""Bytes compared at once: a word without a difference costs as much as one element."""


class Rooms:
    """Where a pass puts what it finds; used again for each pass."""

    def __init__(self, size: int, kind: "np.dtype[Any]") -> None:
        """`size`: most elements of a pass, unsigned integers of `kind`."""
        self.gaps = np.empty(size, np.uint32)
        self.values = np.empty(size, kind)


class Found(NamedTuple):
    """What one pass found."""

    number: int
    """Elements that differ: as many gaps and values are in the rooms."""
    largest: int
    """Largest gap; one that is too large for the rooms is told here."""
    last: int
    """Position of the last difference; `last` as it was given where there is none."""
    sums: words.Sums
    """Of the new state."""


def find(old: np.ndarray, new: np.ndarray, rooms: Rooms, *, last: int, offset: int, over: bool) -> Found:
    """Compare `new` with `old` (both unsigned, of one size and type) and sum it.

    `last`: position of the difference before, which the first gap begins at; negative for one in an earlier pass. `offset`: position
    of the first 32-bit word in the tensor. `over`: write what differs over `old`.
    """
    if not _compiled(new):
        return _find_numpy(old, new, rooms, 0, last=last, offset=offset, over=over)
    each = WORD // new.itemsize
    whole = new.size // each * each
    body = new[:whole]
    count, largest, last, first, second = _finder(new.itemsize)(
        old[:whole].view(np.uint64),
        body.view(np.uint64),
        body.view(np.uint32),
        rooms.gaps,
        rooms.values,
        last,
        np.uint64(offset),
        over,
    )
    found = Found(count, largest, last, (int(first), int(second)))
    if whole == new.size:
        return found
    tail = _find_numpy(
        old[whole:], new[whole:], rooms, count, last=last - whole, offset=offset + body.nbytes // 4, over=over
    )
    return Found(count + tail.number, max(largest, tail.largest), tail.last + whole, words.add(found.sums, tail.sums))


def _find_numpy(
    old: np.ndarray, new: np.ndarray, rooms: Rooms, start: int, *, last: int, offset: int, over: bool
) -> Found:
    """Put what is found into the rooms from `start` on."""
    sums = words.sum_bytes(new.view(np.uint8), offset=offset)
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return Found(0, 0, last, sums)
    gaps = np.diff(positions, prepend=last)
    end = start + positions.size
    rooms.gaps[start:end] = gaps
    rooms.values[start:end] = new[positions]
    if over:
        old[positions] = new[positions]
    return Found(positions.size, int(gaps.max()), int(positions[-1]), sums)


def reach(gaps: np.ndarray) -> tuple[int, bool]:
    """Return (position of the last of `gaps`, whether the positions rise: all gaps but the first are above 0)."""
    if _compiled(gaps):
        last, smallest = _reacher(gaps.itemsize)(gaps)
        return int(last), smallest > 0
    return int(gaps.sum(dtype=np.uint64)), bool(gaps[1:].all())


def write(memory: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> words.Sums:
    """Write `values` to `memory` (unsigned integers of one type) at the positions of `gaps`; return how its sums changed.

    They change by what was read at those positions before, and again afterwards. Gaps but the first are above 0, no position lies outside.
    """
    if memory.itemsize <= 4 and _compiled(memory):
        first, second = _writer(gaps.itemsize, memory.itemsize)(gaps, values, memory)
        return int(first), int(second)
    data = memory.view(np.uint8)
    before = words.sum_bytes(data)
    memory[np.cumsum(gaps, dtype=np.int64)] = values
    return words.subtract(words.sum_bytes(data), before)


def _compiled(data: np.ndarray) -> bool:
    return words.worth_it(data.nbytes) and words.are_compiled()


@functools.cache
def _finder(itemsize: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_find

    return make_find(itemsize)


@functools.cache
def _reacher(gap_bytes: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_reach

    return make_reach(gap_bytes)


@functools.cache
def _writer(gap_bytes: int, itemsize: int) -> Callable[..., Any]:
    from rl_core.weights.kernels import make_write

    return make_write(gap_bytes, itemsize)
