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
BLOCK = 1 << 12
"""32-bit words that are summed before they are compared: they stay in the first cache, so that memory is read once."""
LINE = 8
"""64-bit words that are looked at together first: most have no difference."""

RUN = 1 << 11
"""Elements that are written before they are read again: no later one is written to the same place, and their memory is near yet."""


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


def write(memory: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> words.Sums:
    """Write `values` to `memory` (unsigned integers of one type) at the positions of `gaps`; return how its sums changed.

    They change by what was read at those positions before, and again afterwards. Gaps but the first are above 0, no position lies outside.
    """
    if memory.itemsize <= 4 and _compiled(memory):
        first, second = _writer(memory.itemsize)(gaps.astype(np.uint32), values, memory)
        return int(first), int(second)
    data = memory.view(np.uint8)
    before = words.sum_bytes(data)
    memory[np.cumsum(gaps, dtype=np.int64)] = values
    return words.subtract(words.sum_bytes(data), before)


def _compiled(data: np.ndarray) -> bool:
    return words.worth_it(data.nbytes) and words.are_compiled()


@functools.cache
def _finder(itemsize: int) -> Callable[..., Any]:
    """Return `_find`, compiled for elements of so many bytes."""
    import numba

    element = numba.from_dtype(np.dtype(f"u{itemsize}"))
    long, wide = numba.int64, numba.uint64
    old, new, halves = (
        numba.types.Array(kind, 1, "C", readonly=readonly, aligned=False)
        for kind, readonly in ((wide, False), (wide, True), (numba.uint32, True))
    )
    result = numba.types.Tuple((long, long, long, wide, wide))
    signature = result(old, new, halves, numba.uint32[::1], element[::1], long, wide, numba.boolean)
    kernel: Callable[..., Any] = words.compiled(_find, signature)
    return kernel


def _find(old, new, halves, gaps, values, last, offset, over):  # type: ignore[no-untyped-def]  # compiled
    bits = np.int64(values.itemsize * 8)
    each = np.int64(64) // bits
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    first, second = np.uint64(0), np.uint64(0)
    count, largest = np.int64(0), np.int64(0)
    for start in range(0, halves.size, BLOCK):
        block = halves[start : start + BLOCK]
        plain, weighted = np.uint64(0), np.uint64(0)
        for index in range(block.size):
            word = np.uint64(block[index])
            plain += word
            weighted += word * np.uint64(np.uint32(index + 1))
        first += plain
        second += weighted + plain * (np.uint64(start) + offset)
        end = (start + block.size) // 2
        for line in range(start // 2, end, LINE):
            stop = min(line + LINE, end)
            if stop - line == LINE:
                seen = np.uint64(0)
                for index in range(line, line + LINE):
                    seen |= old[np.uint64(index)] ^ new[np.uint64(index)]
                if not seen:
                    continue
            for index in range(line, stop):
                fresh = new[index]
                differs = old[index] ^ fresh
                if differs:
                    for place in range(each):
                        shift = np.uint64(place * bits)
                        if (differs >> shift) & mask:
                            position = index * each + place
                            gap = position - last
                            gaps[count] = gap
                            values[count] = (fresh >> shift) & mask
                            largest = max(largest, gap)
                            last = position
                            count += 1
                    if over:
                        old[index] = fresh
    return count, largest, last, first, second


@functools.cache
def _writer(itemsize: int) -> Callable[..., Any]:
    """Return `_write`, compiled for elements of 1, 2 or 4 bytes."""
    import numba

    element = numba.from_dtype(np.dtype(f"u{itemsize}"))
    memory = numba.types.Array(element, 1, "C", aligned=False)
    values = numba.types.Array(element, 1, "C", readonly=True, aligned=False)
    result = numba.types.UniTuple(numba.uint64, 2)
    kernel: Callable[..., Any] = words.compiled(_write, result(numba.uint32[::1], values, memory))
    return kernel


def _write(gaps, values, memory):  # type: ignore[no-untyped-def]  # compiled
    bits = np.uint64(memory.itemsize * 8)
    # Of a position: which 32-bit word, and which element of it. Shifts, because a division takes longer than all the rest.
    inside = np.uint64(4 // memory.itemsize - 1)
    narrow = np.uint64(0 if memory.itemsize == 4 else 1 if memory.itemsize == 2 else 2)
    first, second = np.uint64(0), np.uint64(0)
    position = np.uint64(0)
    for start in range(0, values.size, RUN):
        stop, before = min(start + RUN, values.size), position
        for index in range(start, stop):
            position += np.uint64(gaps[index])
            word = np.uint64(memory[position]) << ((position & inside) * bits)
            first -= word
            second -= word * ((position >> narrow) + np.uint64(1))
            memory[position] = values[index]
        position = before
        for index in range(start, stop):
            position += np.uint64(gaps[index])
            word = np.uint64(memory[position]) << ((position & inside) * bits)
            first += word
            second += word * ((position >> narrow) + np.uint64(1))
    return first, second
