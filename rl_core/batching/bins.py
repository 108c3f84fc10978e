"""Bin packing of sequence lengths into passes of a token capacity (algorithms.md 9, Packing)."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from rl_core.batching.balance import Parts, longest_first
from rl_core.batching.kernels import Ints, first_fit, run


def pack_lengths(
    lengths: Sequence[int], capacity: int, *, algorithm: str = "ffd", min_bins: int = 1, bin_multiple: int = 1
) -> Parts:
    """Return bins of indices of `lengths` (tokens), each bin's sum at most `capacity`.

    `ffd`: by (-length, index) into the first bin that fits. `bfd`: same order, the fitting bin with least room left (earliest
    on ties). `concatenative`: input order, a new bin when the next does not fit. Bins come in creation order, members in
    placement order; no lengths give no bins. The number of bins is raised to `min_bins`, then to a multiple of
    `bin_multiple`, by splitting, each time, the heaviest bin of two or more members with longest_first: the heavier half
    stays, the other becomes the last bin. Raises ValueError when a length is outside [1, capacity], the algorithm is
    unknown, or there are fewer lengths than bins wanted.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(sorted(_ALGORITHMS))}, got {algorithm!r}")
    if bin_multiple < 1:
        raise ValueError(f"bin_multiple must be at least 1, got {bin_multiple}")
    values = np.asarray(lengths, np.int64).reshape(-1)
    if not values.size:
        return []
    check_lengths(values, capacity, name="capacity")
    bins = _ALGORITHMS[algorithm](values, capacity)
    wanted = max(len(bins), min_bins)
    wanted += -wanted % bin_multiple
    if wanted > values.size:
        raise ValueError(
            f"{wanted} bins (min_bins {min_bins}, bin_multiple {bin_multiple}) need at least as many lengths, "
            f"got {values.size}; lower min_bins or bin_multiple"
        )
    return _split_up_to(bins, values.tolist(), wanted)


def check_lengths(values: Ints, limit: int, *, name: str) -> None:
    """Raise ValueError unless all `values` are in [1, limit]; the text holds index, length and limit."""
    wrong = (values < 1) | (values > limit)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"lengths[{index}] must be in [1, {name} {limit}], got {values[index]}; raise {name} or drop the sequence"
        )


def best_fit(values: Ints, capacity: int) -> Parts:
    """Return best-fit-decreasing bins. O(n log n).

    The rooms of open bins are kept sorted as one integer each, room * n + bin, so that one bisection finds the least room
    that fits and, among equals, the earliest bin.
    """
    count = len(values)
    bins: Parts = []
    rooms: list[int] = []
    sizes = values.tolist()
    for item in descending(values).tolist():
        size = sizes[item]
        at = bisect_left(rooms, size * count)
        if at < len(rooms):
            room, chosen = divmod(rooms.pop(at), count)
            bins[chosen].append(item)
        else:
            room, chosen = capacity, len(bins)
            bins.append([item])
        insort(rooms, (room - size) * count + chosen)
    return bins


def descending(values: Ints) -> Ints:
    """Return the indices of `values` sorted by (-value, index)."""
    return np.argsort(-values, kind="stable")


def _first_fit(values: Ints, capacity: int) -> Parts:
    order = descending(values)
    bin_of = run(first_fit, values[order], capacity).tolist()
    bins: Parts = [[] for _ in range(max(bin_of) + 1)]
    for item, chosen in zip(order.tolist(), bin_of, strict=True):
        bins[chosen].append(item)
    return bins


def _concatenative(values: Ints, capacity: int) -> Parts:
    bins: Parts = []
    room = 0
    for item, size in enumerate(values.tolist()):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= size
    return bins


_ALGORITHMS = {"ffd": _first_fit, "bfd": best_fit, "concatenative": _concatenative}


def _split_up_to(bins: Parts, sizes: list[int], wanted: int) -> Parts:
    """Split heaviest bins until there are `wanted`; possible whenever there are as many items (some bin then holds two)."""
    loads = [sum(sizes[item] for item in members) if len(members) > 1 else -1 for members in bins]
    while len(bins) < wanted:
        heaviest = max(range(len(bins)), key=loads.__getitem__)
        members = bins[heaviest]
        halves = longest_first([sizes[item] for item in members], 2)
        bins[heaviest], added = ([members[position] for position in half] for half in halves)
        bins.append(added)
        loads.append(-1)
        for index in (heaviest, len(bins) - 1):
            loads[index] = sum(sizes[item] for item in bins[index]) if len(bins[index]) > 1 else -1
    return bins
