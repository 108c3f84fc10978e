"""Rows of one rank in micro-batches: as many on every rank, each within a token budget (algorithms.md 9, Micro-batches)."""

from collections.abc import Callable, Sequence

import numpy as np

from rl_core.batching.balance import Parts, karmarkar_karp
from rl_core.batching.bins import best_fit, check_lengths


def plan_microbatches(
    lengths: Sequence[int],
    *,
    token_budget: int,
    min_count: int = 1,
    count_multiple: int = 1,
    agree: Callable[[int], int] | None = None,
) -> Parts:
    """Return lists of rows whose padded `lengths` sum to at most `token_budget` tokens each.

    All data-parallel ranks get equally many lists: `agree(n)` returns the maximum of n over them and is called by every
    rank equally often (None: one rank). The count is a multiple of `count_multiple` (virtual pipeline) and at least
    `min_count`; lists are balanced by length, heaviest first, and the last may be empty.
    Raises ValueError when a length is outside [1, token_budget] or a count is below its least value.
    """
    if min_count < 0 or count_multiple < 1:
        raise ValueError(f"min_count must be >= 0 and count_multiple >= 1, got {min_count} and {count_multiple}")
    values = np.asarray(lengths, np.int64).reshape(-1)
    check_lengths(values, token_budget, name="token_budget")
    agreed = agree if agree is not None else int
    count = max(len(best_fit(values, token_budget)), min_count)
    count = agreed(count + -count % count_multiple)
    while True:
        parts = karmarkar_karp(values.tolist(), count) if count else []
        exceeds = any(int(values[part].sum()) > token_budget for part in parts)
        if not agreed(int(exceeds)):
            return parts
        count += count_multiple


def fixed_microbatches(rows: int, size: int) -> Parts:
    """Return the rows 0..rows-1 in consecutive lists of `size`; the last is shorter when they do not divide.

    Raises ValueError when rows < 0 or size < 1.
    """
    if rows < 0 or size < 1:
        raise ValueError(f"rows must be >= 0 and size >= 1, got {rows} and {size}")
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]
