"""Partitions of rows into parts of nearly equal cost."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from rl_core.batching.kernels import Floats, Ints, largest_differencing, run

Parts = list[list[int]]
Item = TypeVar("Item")


def sequence_costs(lengths: Sequence[int], *, linear: float = 1.0, quadratic: float = 0.0) -> list[float]:
    """Return linear * n + quadratic * n^2 for each length n.

    For a transformer of hidden size h, quadratic = 1 / (12 h) weighs attention against the layers' 12 h^2 products:
    at h 1024, n 4096 costs 5461.3.
    """
    values = np.asarray(lengths, np.float64)
    costs: list[float] = (linear * values + quadratic * values * values).tolist()
    return costs


def karmarkar_karp(costs: Sequence[float], parts: int, *, equal_size: bool = False) -> Parts:
    """Return the indices of `costs` in `parts` sets of nearly equal cost, by largest differencing.

    `equal_size` gives every set the same number of members. Sets come by descending cost (ties: smallest member), members
    ascending; with fewer items than parts the last sets are empty, otherwise none is. Deterministic.
    Raises ValueError when parts < 1, a cost is negative or not finite, or `equal_size` does not divide.
    """
    values = _checked(costs, parts)
    if equal_size and len(values) % parts:
        raise ValueError(
            f"equal_size needs the number of items to be a multiple of parts, got {len(values)} items in {parts} parts; "
            "pad the items or drop equal_size"
        )
    if parts == 1:
        return [list(range(len(values)))]
    if len(values) == 0:
        return [[] for _ in range(parts)]
    order = np.argsort(-values, kind="stable")
    chunk = parts if equal_size else 1
    part_of = run(largest_differencing, values, order, parts, chunk)
    return _sorted_parts(values, part_of, parts)


def load_ratio(costs: Sequence[float], parts: Parts) -> float:
    """Return the largest cost of a part over the mean cost of the parts (empty ones count); 1.0 when all cost nothing.

    Raises ValueError when there are no parts.
    """
    if not parts:
        raise ValueError("parts must hold at least one list, got none")
    loads = [math.fsum(map(costs.__getitem__, part)) for part in parts]
    total = math.fsum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def split_evenly(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Return `parts` contiguous slices of `items` whose sizes differ by at most one, larger first.

    Raises ValueError when parts < 1.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    size, larger = divmod(len(items), parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def _checked(costs: Sequence[float], parts: int) -> Floats:
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    values = np.array(costs, np.float64).reshape(-1)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"costs[{index}] must be finite and not negative, got {values[index]}")
    return values


def _sorted_parts(values: Floats, part_of: Ints, parts: int) -> Parts:
    """Return the sets of equal `part_of` by (-cost, smallest member), padded with empty sets."""
    members: dict[int, list[int]] = {}
    for index, part in enumerate(part_of.tolist()):
        members.setdefault(part, []).append(index)
    costs = values.tolist()
    ordered = sorted(members.values(), key=lambda part: (-math.fsum([costs[index] for index in part]), part[0]))
    return ordered + [[] for _ in range(parts - len(ordered))]
