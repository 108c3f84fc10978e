"""Where two runs of elements differ in their bits; compiled like the checksums of `words`, numpy where those are not loaded."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_core.weights import words

WORD = 8
"""Bytes compared at once: a word without a difference costs as much as one element."""


def positions(old: np.ndarray, new: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the positions, rising, at which `new` differs from `old` (both unsigned, of one size and type).

    `room`: int64 [size of `new` or more], written; the result may view it.
    """
    if not (new.nbytes >= words.COMPILED_FROM or words.kernels.cache_info().currsize):
        return np.flatnonzero(old != new)
    each = WORD // new.itemsize
    whole = new.size // each * each
    sides = (side[:whole].view(np.uint64) for side in (old, new))
    count = _kernel()(*sides, np.uint64(new.itemsize * 8), room)
    tail = np.flatnonzero(old[whole:] != new[whole:]) + whole
    room[count : count + tail.size] = tail
    return room[: count + tail.size]


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Return `_differ`, compiled where numba is installed."""
    try:
        import numba
    except ImportError:
        return _differ_numpy
    side = numba.types.Array(numba.uint64, 1, "C", readonly=True, aligned=False)
    kernel: Callable[..., Any] = words.compiled(_differ, numba.int64(side, side, numba.uint64, numba.int64[::1]))
    return kernel


def _differ(old, new, bits, room):  # type: ignore[no-untyped-def]  # compiled
    each = np.int64(np.uint64(64) // bits)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits)
    count = np.int64(0)
    for index in range(new.size):
        word = old[index] ^ new[index]
        if word:
            for place in range(each):
                if (word >> (np.uint64(place) * bits)) & mask:
                    room[count] = index * each + place
                    count += 1
    return count


def _differ_numpy(old: np.ndarray, new: np.ndarray, bits: np.uint64, room: np.ndarray) -> int:
    kind = np.dtype(f"u{int(bits) // 8}")
    found = np.flatnonzero(old.view(kind) != new.view(kind))
    room[: found.size] = found
    return found.size
