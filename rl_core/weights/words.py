"""Sums over 32-bit words, compiled: the checksum of host memory alone, or in the same pass as its copy.

`manifest.checksum` is the face. The kernels are numba functions cached on disk, so that a process pays milliseconds at
first use; without numba the same numbers come from numpy at a seventh of the speed. All arithmetic wraps mod 2^64.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

COMPILED_FROM = 1 << 20
"""Bytes of a tensor from which loading numba (about 120 MB of memory, once) pays; numpy does smaller ones until then."""
BLOCK = 1 << 16
"""Words that numpy sums at once; bounds its temporaries."""
_MASK = (1 << 64) - 1

Sums = tuple[int, int]
"""(sum w_i, sum (i + 1) w_i), each mod 2^64."""


def sum_bytes(source: np.ndarray, *, offset: int = 0) -> Sums:
    """Return the sums of `source` (uint8, contiguous), read as little-endian words with zeros after its end.

    `offset` is the position of its first word in the whole tensor, so that the sums of slices add up.
    """
    words, tail = _split(source)
    sums = _kernels_for(words)[0](words, np.uint64(offset))
    return _with_tail(sums, tail, offset + words.size)


def copy_bytes(destination: np.ndarray, source: np.ndarray, *, offset: int = 0) -> Sums:
    """Copy `source` to `destination` (both uint8, contiguous, of one size) and return its sums, in one pass."""
    words, tail = _split(source)
    sums = _kernels_for(words)[1](_words(destination[: words.nbytes]), words, np.uint64(offset))
    destination[words.nbytes :] = tail
    return _with_tail(sums, tail, offset + words.size)


def add(first: Sums, second: Sums) -> Sums:
    """Return the sums of two parts of one tensor."""
    return (first[0] + second[0]) & _MASK, (first[1] + second[1]) & _MASK


def subtract(first: Sums, second: Sums) -> Sums:
    """Return what `second` lacks of `first`."""
    return (first[0] - second[0]) & _MASK, (first[1] - second[1]) & _MASK


def _kernels_for(words: np.ndarray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the compiled kernels where they are loaded or worth it, else numpy's."""
    return kernels() if worth_it(words.nbytes) else (_sum_numpy, _copy_numpy)


def worth_it(nbytes: int) -> bool:
    """Return whether compiled kernels are loaded, or are to be for so many bytes."""
    return nbytes >= COMPILED_FROM or bool(kernels.cache_info().currsize)


def are_compiled() -> bool:
    """Return whether numba is installed; loads the kernels."""
    return kernels()[0] is not _sum_numpy


def _split(source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    whole = source.size & ~3
    return _words(source[:whole]), source[whole:]


def _words(data: np.ndarray) -> np.ndarray:
    return data.view(np.uint32)


def _with_tail(sums: Any, tail: np.ndarray, position: int) -> Sums:
    first, second = int(sums[0]), int(sums[1])
    if tail.size:
        word = int.from_bytes(tail.tobytes(), "little")
        return add((first, second), (word, (position + 1) * word & _MASK))
    return first, second


def worth_compiling(shapes: Iterable[Sequence[int]]) -> bool:
    """Return whether any tensor of these shapes, 4 bytes an element, is one that loads the compiled kernels."""
    return any(4 * math.prod(shape) >= COMPILED_FROM for shape in shapes)


@functools.cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return (sum, copy and sum) over uint32 arrays; compiled where numba is installed."""
    try:
        from rl_core.weights.kernels import make_copy, make_sum
    except ImportError:
        logger.warning("numba is not installed; weight checksums use numpy, about 7 times slower")
        return _sum_numpy, _copy_numpy
    return make_sum(), make_copy()


_POSITIONS = np.arange(1, BLOCK + 1, dtype=np.uint64)


def _sum_numpy(words: np.ndarray, offset: np.uint64) -> Sums:
    first = second = 0
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK].astype(np.uint64)
        plain = int(block.sum(dtype=np.uint64))
        first += plain
        second += int((block * _POSITIONS[: block.size]).sum(dtype=np.uint64)) + plain * (start + int(offset))
    return first & _MASK, second & _MASK


def _copy_numpy(destination: np.ndarray, words: np.ndarray, offset: np.uint64) -> Sums:
    np.copyto(destination, words)
    return _sum_numpy(destination, offset)
