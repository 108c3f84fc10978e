"""The two inner loops that Python is too slow for: first-fit over bins and largest differencing over parts.

Each kernel is one plain function over numpy arrays. Small inputs run it as it stands (milliseconds, and numba is not
even imported); large ones run it compiled by numba, cached on disk. Both give equal results, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

COMPILE_ABOVE = 512
"""Items above which a kernel is compiled; so many take a few milliseconds of plain Python."""


def run(kernel: Callable[..., Ints], items: Ints | Floats, *arguments: Any) -> Ints:
    """Return `kernel(items, *arguments)`, compiled when there are more than COMPILE_ABOVE items."""
    return (compiled(kernel) if len(items) > COMPILE_ABOVE else kernel)(items, *arguments)


@cache
def compiled(kernel: Callable[..., Ints]) -> Callable[..., Ints]:
    """Return `kernel` compiled by numba: cached on disk, or for this process where no cache folder can be written."""
    import numba

    try:
        return numba.njit(cache=True)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:
        # numba's "no locator available": neither the package's nor the user's cache folder is writable
        return numba.njit(kernel)  # type: ignore[no-any-return]


def largest_differencing(costs: Floats, order: Ints, parts: int, chunk: int) -> Ints:
    """Return the part (an arbitrary number in [0, n)) of each item by Karmarkar-Karp largest differencing.

    `costs` [n] >= 0; `order` [n] sorts the items by (-cost, index); `parts` >= 2. A state is a partition of some items into `parts` sets,
    sorted by (-sum, smallest member); a set is identified by its smallest member. The first states hold `chunk` consecutive items of
    `order`, one per set; `chunk` is 1, or `parts` if all parts must have equal size. Then the two states with the largest difference (first
    set - last set; ties: smallest member) are merged, the first set of one with the last set of the other, until one state is left.
    Source: Karmarkar and Karp, "The differencing method of set partitioning" (1982); k-way: Korf, IJCAI 2009.
    """
    count = len(costs)
    states = count // chunk
    total = costs.copy()  # sum of the bag whose smallest member is this item
    following = np.full(count, -1)  # next member of the same bag
    last = np.arange(count)  # last member of the bag whose smallest member is this item
    bags = np.full((states, parts), -1)
    used = np.full(states, chunk)
    heap = [(0.0, 0, 0) for _ in range(states)]
    for state in range(states):
        bags[state, :chunk] = order[state * chunk : (state + 1) * chunk]
        smallest = total[bags[state, chunk - 1]] if chunk == parts else 0.0
        heap[state] = (smallest - total[bags[state, 0]], bags[state, :chunk].min(), state)
    heapq.heapify(heap)

    while len(heap) > 1:
        _, lowest, left = heapq.heappop(heap)
        _, other_lowest, right = heap[0]
        filled = used[left]
        for slot in range(used[right]):
            bag, target = bags[right, slot], parts - 1 - slot
            if target >= used[left]:
                bags[left, filled] = bag
                filled += 1
                continue
            root, merged = min(bag, bags[left, target]), max(bag, bags[left, target])
            following[last[root]] = merged
            last[root] = last[merged]
            total[root] += total[merged]
            bags[left, target] = root
        used[left] = filled
        for slot in range(1, filled):  # insertion sort by (-sum, smallest member)
            bag = bags[left, slot]
            target_slot = slot
            while target_slot > 0:
                neighbor = bags[left, target_slot - 1]
                if total[neighbor] > total[bag] or (total[neighbor] == total[bag] and neighbor < bag):
                    break
                bags[left, target_slot] = neighbor
                target_slot -= 1
            bags[left, target_slot] = bag
        smallest = total[bags[left, parts - 1]] if filled == parts else 0.0
        heapq.heapreplace(heap, (smallest - total[bags[left, 0]], min(lowest, other_lowest), left))

    part_of = np.empty(count, np.int64)
    survivor = heap[0][2]
    for bag in bags[survivor, : used[survivor]]:
        item = bag
        while item >= 0:
            part_of[item] = bag
            item = following[item]
    return part_of
