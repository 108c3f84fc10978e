"""Splits the rows of a rank into micro-batches: equally many on every rank, each within a token budget."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from rl_core.batching.balance import Parts, karmarkar_karp
from rl_core.batching.kernels import Ints


def plan_microbatches(
    lengths: Sequence[int],
    *,
    token_budget: int,
    agree: Callable[[int], int] | None = None,
) -> Parts:
    """Return the micro-batches as lists of row numbers; the `lengths` of a list's rows sum to at most `token_budget` tokens.

    All data-parallel ranks get equally many lists, at least one: `agree(n)` returns the maximum of n over the ranks, and every rank
    calls it equally often (None: there is one rank). Lists are balanced by length, heaviest first; the last ones may be empty.
    Raises ValueError when a length is outside [1, token_budget].
    """
    if agree is None and min(lengths, default=1) >= 1 and sum(lengths) <= token_budget:
        return [list(range(len(lengths)))]
    values = np.asarray(lengths, np.int64).reshape(-1)
    _check_lengths(values, token_budget)
    max_over_ranks = agree if agree is not None else int
    count = max_over_ranks(1 if values.sum() <= token_budget else _best_fit(values, token_budget))
    while True:
        parts = karmarkar_karp(values.tolist(), count)
        exceeds = any(int(values[part].sum()) > token_budget for part in parts)
        if not max_over_ranks(int(exceeds)):
            return parts
        count += 1


def _best_fit(values: Ints, capacity: int) -> int:
    """Return the number of bins of `capacity` that best-fit-decreasing bin packing needs for items of sizes `values`. O(n log n).

    The free space of each open bin is kept sorted, so that one bisection finds the fullest bin that has room for an item.
    """
    free: list[int] = []
    for size in sorted(values.tolist(), reverse=True):
        index = bisect_left(free, size)
        room = free.pop(index) if index < len(free) else capacity
        insort(free, room - size)
    return len(free)


def _check_lengths(values: Ints, limit: int) -> None:
    """Raise ValueError naming the first length outside [1, limit]."""
    wrong = (values < 1) | (values > limit)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"lengths[{index}] must be in [1, token_budget {limit}], got {values[index]}; raise token_budget or drop the sequence"
        )
