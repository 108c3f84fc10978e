"""Checksums of host memory, computed alone or in the same pass as a copy.

`manifest.checksum` is the function for tensors on any device. Large arrays use numba kernels that are cached on disk, so loading
them takes milliseconds. Without numba, numpy computes the same values about 7 times slower. All arithmetic is modulo 2^64.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

COMPILED_FROM = 1 << 20
"""Smallest array, bytes, for which numba is loaded (it takes about 120 MB of memory, once). Smaller arrays use numpy until then."""
BLOCK = 1 << 16
"""Number of 32-bit words that numpy sums at once. It limits the temporary arrays."""
_MASK = (1 << 64) - 1

Checksum = tuple[int, int]
"""(sum w_i, sum (i + 1) w_i) over 32-bit words w_i, each modulo 2^64."""


def sum_bytes(source: np.ndarray, *, offset: int = 0) -> Checksum:
    """Return the checksum of `source` (uint8, contiguous), read as little-endian 32-bit words and padded with zeros.

    `offset` is the index of its first word in the full tensor; with it the checksums of slices add up to that of the tensor.
    """
    words, tail = _split(source)
    sums = _kernels_for(words)[0](words, np.uint64(offset))
    return _with_tail(sums, tail, offset + words.size)


def copy_bytes(destination: np.ndarray, source: np.ndarray, *, offset: int = 0) -> Checksum:
    """Copy `source` to `destination` (both uint8, contiguous, of equal size) and return the checksum of `source`, in one pass."""
    words, tail = _split(source)
    sums = _kernels_for(words)[1](_words(destination[: words.nbytes]), words, np.uint64(offset))
    destination[words.nbytes :] = tail
    return _with_tail(sums, tail, offset + words.size)


def copy_and_read_back(destination: np.ndarray, source: np.ndarray, *, offset: int = 0) -> Checksum:
    """Copy `source` to `destination` as `copy_bytes` does, and return the checksum of `destination`.

    Each block of the destination is read right after it was written, while the processor has it in its cache.
    """
    words, tail = _split(source)
    copy = _words(destination[: words.nbytes])
    sums = _kernels_for(words)[2](copy, words, np.uint64(offset))
    destination[words.nbytes :] = tail
    return _with_tail(sums, destination[words.nbytes :], offset + words.size)


def add(first: Checksum, second: Checksum) -> Checksum:
    """Return the checksum of a tensor from the checksums of two disjoint parts of it."""
    return (first[0] + second[0]) & _MASK, (first[1] + second[1]) & _MASK


def subtract(first: Checksum, second: Checksum) -> Checksum:
    """Return `first` - `second`: the change of a checksum, or the checksum of the other part of a tensor."""
    return (first[0] - second[0]) & _MASK, (first[1] - second[1]) & _MASK


def _kernels_for(words: np.ndarray) -> tuple[Callable[..., Any], ...]:
    """Return what `kernels` does: the compiled functions if `should_compile`, else those of numpy."""
    return kernels() if should_compile(words.nbytes) else NUMPY


def should_compile(nbytes: int) -> bool:
    """Return whether an array of `nbytes` uses the compiled kernels: they are loaded already, or the array is large enough to load them."""
    return nbytes >= COMPILED_FROM or bool(kernels.cache_info().currsize)


def are_compiled() -> bool:
    """Return whether numba is installed. Loads the kernels."""
    return kernels()[0] is not _sum_numpy


def _split(source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    aligned_size = source.size & ~3
    return _words(source[:aligned_size]), source[aligned_size:]


def _words(data: np.ndarray) -> np.ndarray:
    return data.view(np.uint32)


def _with_tail(sums: Any, tail: np.ndarray, position: int) -> Checksum:
    first, second = int(sums[0]), int(sums[1])
    if tail.size:
        word = int.from_bytes(tail.tobytes(), "little")
        return add((first, second), (word, (position + 1) * word & _MASK))
    return first, second


def has_large_tensor(shapes: Iterable[Sequence[int]]) -> bool:
    """Return whether a model with these shapes (4 bytes per element) has a tensor that is large enough to load the compiled kernels."""
    return any(4 * math.prod(shape) >= COMPILED_FROM for shape in shapes)


@functools.cache
def kernels() -> tuple[Callable[..., Any], ...]:
    """Return the functions (sum, copy and sum, copy and read back) for uint32 arrays: compiled if numba is installed, else numpy."""
    try:
        from rl_core.weights.kernels import make_copy, make_copy_read_back, make_sum
    except ImportError:
        logger.warning("numba is not installed; weight checksums use numpy, about 7 times slower")
        return NUMPY
    return make_sum(), make_copy(), make_copy_read_back()


_POSITIONS = np.arange(1, BLOCK + 1, dtype=np.uint64)


def _sum_numpy(words: np.ndarray, offset: np.uint64) -> Checksum:
    first = second = 0
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK].astype(np.uint64)
        plain = int(block.sum(dtype=np.uint64))
        first += plain
        second += int((block * _POSITIONS[: block.size]).sum(dtype=np.uint64)) + plain * (start + int(offset))
    return first & _MASK, second & _MASK


def _copy_numpy(destination: np.ndarray, words: np.ndarray, offset: np.uint64) -> Checksum:
    np.copyto(destination, words)
    return _sum_numpy(destination, offset)


NUMPY = (_sum_numpy, _copy_numpy, _copy_numpy)
"""The functions of `kernels` without numba."""
