"""Numba kernels over host memory: checksums, copies, comparisons and scattered writes. `checksums` and `delta` import this module late.

Each kernel is compiled on first use and cached on disk, so that loading it takes milliseconds. All arithmetic is modulo 2^64. Results
are described where the kernels are called.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

BLOCK = 1 << 16
"""Number of words summed as one block. Positions inside a block fit 32 bits, so products are 32 x 32 -> 64 bit, which vectorises."""
COMPARE_BLOCK = 1 << 12
"""Number of words that are summed before they are compared. They stay in the L1 cache, so memory is read once."""
LINE = 8
"""Number of 64-bit words tested at once for any difference; most have none."""
WRITE_BLOCK = 1 << 9
"""Number of elements that are written before they are read again for the checksum, while they are still in the cache."""
READ_BACK_BLOCK = 1 << 10
"""Number of words that are copied before the copy is read. It stays in the L1 cache, beside as many words of the source."""
PREFETCH_DISTANCE = 16
"""Number of elements that are prefetched ahead, so that their cache misses overlap."""

SUMS = numba.types.UniTuple(numba.uint64, 2)


def view_of(element: Any, *, readonly: bool = False) -> Any:
    """Return the numba type of a contiguous, possibly unaligned array of `element`."""
    return numba.types.Array(element, 1, "C", readonly=readonly, aligned=False)


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Return `function` compiled for `signature`, cached on disk if there is a folder for the cache."""
    try:
        kernel: Callable[..., Any] = numba.njit([signature], nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in: read-only package and no home
        kernel = numba.njit([signature], nogil=True)(function)
    return kernel


def make_sum() -> Callable[..., Any]:
    """Return (words, offset) -> sums."""
    return compiled(_sum, SUMS(view_of(numba.uint32, readonly=True), numba.uint64))


def make_copy() -> Callable[..., Any]:
    """Return (destination, words, offset) -> sums."""
    return compiled(_copy, SUMS(view_of(numba.uint32), view_of(numba.uint32, readonly=True), numba.uint64))


def make_copy_read_back() -> Callable[..., Any]:
    """Return (destination, words, offset) -> sums of the destination."""
    return compiled(_copy_read_back, SUMS(view_of(numba.uint32), view_of(numba.uint32, readonly=True), numba.uint64))


def make_find(itemsize: int) -> Callable[..., Any]:
    """Return the comparison for elements of `itemsize` bytes.

    (old, new, new as uint32, gaps, values, last, offset, overwrite) -> (count, largest gap, last, checksum)
    """
    element, long, wide = _unsigned(itemsize), numba.int64, numba.uint64
    states = view_of(wide), view_of(wide, readonly=True), view_of(numba.uint32, readonly=True)
    result = numba.types.Tuple((long, long, long, wide, wide))
    return compiled(_find, result(*states, numba.uint32[::1], element[::1], long, wide, numba.boolean))


def make_gap_check(gap_bytes: int) -> Callable[..., Any]:
    """Return a compiled function (gaps) -> (sum of the gaps, smallest gap except the first), which shows whether positions are valid."""
    return compiled(_check_gaps, SUMS(view_of(_unsigned(gap_bytes), readonly=True)))


def make_write(gap_bytes: int, itemsize: int) -> Callable[..., Any]:
    """Return (gaps, values, memory) -> change of the checksum, for elements of 1, 2 or 4 bytes."""
    gaps, element = _unsigned(gap_bytes), _unsigned(itemsize)
    return compiled(_write, SUMS(view_of(gaps, readonly=True), view_of(element, readonly=True), view_of(element)))


def _unsigned(itemsize: int) -> Any:
    return numba.from_dtype(np.dtype(f"u{itemsize}"))


@intrinsic
def _prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Prefetch `array[index]` for writing, without waiting for it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(view.data, [arguments[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        write_access, locality, data_cache = (ir.Constant(int32, value) for value in (1, 3, 1))
        builder.call(function, [address, write_access, locality, data_cache])
        return context.get_dummy_value()

    return numba.types.void(array, index), generate


@register_jitable(inline="always")
def _sum_block(block):  # type: ignore[no-untyped-def]
    plain, weighted = np.uint64(0), np.uint64(0)
    for index in range(block.size):
        word = np.uint64(block[index])
        plain += word
        weighted += word * np.uint64(np.uint32(index + 1))
    return plain, weighted


def _sum(words, offset):  # type: ignore[no-untyped-def]
    first, second = np.uint64(0), np.uint64(0)
    for start in range(0, words.size, BLOCK):
        plain, weighted = _sum_block(words[start : start + BLOCK])
        first += plain
        second += weighted + plain * (np.uint64(start) + offset)
    return first, second


def _copy(destination, words, offset):  # type: ignore[no-untyped-def]
    first, second = np.uint64(0), np.uint64(0)
    for start in range(0, words.size, BLOCK):
        block, target = words[start : start + BLOCK], destination[start : start + BLOCK]
        plain, weighted = np.uint64(0), np.uint64(0)
        for index in range(block.size):
            value = block[index]
            target[index] = value
            word = np.uint64(value)
            plain += word
            weighted += word * np.uint64(np.uint32(index + 1))
        first += plain
        second += weighted + plain * (np.uint64(start) + offset)
    return first, second


def _copy_read_back(destination, words, offset):  # type: ignore[no-untyped-def]
    first, second = np.uint64(0), np.uint64(0)
    for start in range(0, words.size, READ_BACK_BLOCK):
        block, target = words[start : start + READ_BACK_BLOCK], destination[start : start + READ_BACK_BLOCK]
        for index in range(block.size):
            target[index] = block[index]
        plain, weighted = _sum_block(target)
        first += plain
        second += weighted + plain * (np.uint64(start) + offset)
    return first, second


def _find(old, new, half_words, gaps, values, last, offset, overwrite):  # type: ignore[no-untyped-def]
    bits = np.int64(values.itemsize * 8)
    elements_per_word = np.int64(64) // bits
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    first, second = np.uint64(0), np.uint64(0)
    count, largest = np.int64(0), np.int64(0)
    for start in range(0, half_words.size, COMPARE_BLOCK):
        block = half_words[start : start + COMPARE_BLOCK]
        plain, weighted = _sum_block(block)
        first += plain
        second += weighted + plain * (np.uint64(start) + offset)
        end = (start + block.size) // 2
        for line in range(start // 2, end, LINE):
            stop = min(line + LINE, end)
            if stop - line == LINE:
                difference_bits = np.uint64(0)
                for index in range(line, line + LINE):
                    difference_bits |= old[np.uint64(index)] ^ new[np.uint64(index)]
                if not difference_bits:
                    continue
            for index in range(line, stop):
                new_word = new[index]
                differs = old[index] ^ new_word
                if differs:
                    for lane in range(elements_per_word):
                        shift = np.uint64(lane * bits)
                        if (differs >> shift) & mask:
                            position = index * elements_per_word + lane
                            gap = position - last
                            gaps[count] = gap
                            values[count] = (new_word >> shift) & mask
                            largest = max(largest, gap)
                            last = position
                            count += 1
                    if overwrite:
                        old[index] = new_word
    return count, largest, last, first, second


def _check_gaps(gaps):  # type: ignore[no-untyped-def]
    total, smallest = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
    for index in range(1, gaps.size):
        gap = np.uint64(gaps[index])
        total += gap
        smallest = min(smallest, gap)
    return total + np.uint64(gaps[0]), smallest


def _write(gaps, values, memory):  # type: ignore[no-untyped-def]
    bits = np.uint64(memory.itemsize * 8)
    # `position >> word_shift` is the index of the 32-bit word that holds an element, and `position & lane_mask` the element's place in it.
    # Shifts are used because a division would take longer than the rest of the loop.
    lane_mask = np.uint64(4 // memory.itemsize - 1)
    word_shift = np.uint64(0 if memory.itemsize == 4 else 1 if memory.itemsize == 2 else 2)
    first, second = np.uint64(0), np.uint64(0)
    position = np.uint64(0)
    positions = np.empty(WRITE_BLOCK + PREFETCH_DISTANCE, np.uint64)
    for start in range(0, values.size, WRITE_BLOCK):
        count = min(WRITE_BLOCK, values.size - start)
        for index in range(count):
            position += np.uint64(gaps[start + index])
            positions[index] = position
        positions[count : count + PREFETCH_DISTANCE] = position
        for index in range(PREFETCH_DISTANCE):
            _prefetch(memory, positions[index])
        for index in range(count):
            _prefetch(memory, positions[index + PREFETCH_DISTANCE])
            target = positions[index]
            word = np.uint64(memory[target]) << ((target & lane_mask) * bits)
            first -= word
            second -= word * ((target >> word_shift) + np.uint64(1))
            memory[target] = values[start + index]
        for index in range(count):
            target = positions[index]
            word = np.uint64(memory[target]) << ((target & lane_mask) * bits)
            first += word
            second += word * ((target >> word_shift) + np.uint64(1))
    return first, second
