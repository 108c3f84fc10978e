"""Bin packing: worked examples, the definitions of the three algorithms as brute force, and the bin-count rules."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batching import kernels
from rl_core.batching.bins import pack_lengths

EXAMPLE = [10, 7, 11, 2, 5, 2]


@pytest.mark.parametrize(
    ("algorithm", "bins"),
    [
        ("ffd", [[2, 3], [0, 5], [1, 4]]),
        ("bfd", [[2, 5], [0], [1, 4, 3]]),
        ("concatenative", [[0], [1], [2, 3], [4, 5]]),
    ],
)
def test_worked_example(algorithm, bins):
    assert pack_lengths(EXAMPLE, 14, algorithm=algorithm) == bins


def by_definition(lengths, capacity, algorithm):
    order = list(range(len(lengths)))
    if algorithm != "concatenative":
        order.sort(key=lambda index: (-lengths[index], index))
    bins = []
    for item in order:
        room = [capacity - sum(lengths[member] for member in members) for members in bins]
        fitting = [index for index, free in enumerate(room) if free >= lengths[item]]
        if algorithm == "concatenative":
            fitting = [index for index in fitting if index == len(bins) - 1]
        if algorithm == "bfd":
            fitting.sort(key=lambda index: (room[index], index))
        if fitting:
            bins[fitting[0]].append(item)
        else:
            bins.append([item])
    return bins


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    capacity=st.integers(40, 90),
    algorithm=st.sampled_from(["ffd", "bfd", "concatenative"]),
)
def test_bins_are_those_of_the_definition(lengths, capacity, algorithm):
    assert pack_lengths(lengths, capacity, algorithm=algorithm) == by_definition(lengths, capacity, algorithm)


@pytest.mark.parametrize("count", [kernels.COMPILE_ABOVE - 1, kernels.COMPILE_ABOVE + 88])
def test_compiled_and_plain_first_fit_agree(count):
    lengths = [(index * 7919) % 997 + 1 for index in range(count)]
    assert pack_lengths(lengths, 2000) == by_definition(lengths, 2000, "ffd")


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    min_bins=st.integers(1, 12),
    multiple=st.integers(1, 5),
    algorithm=st.sampled_from(["ffd", "bfd", "concatenative"]),
)
def test_bin_count_reaches_minimum_and_multiple_and_keeps_every_item(lengths, min_bins, multiple, algorithm):
    fewest = len(pack_lengths(lengths, 50, algorithm=algorithm))
    wanted = max(fewest, min_bins)
    wanted += -wanted % multiple
    if wanted > len(lengths):
        with pytest.raises(ValueError, match=f"{wanted} bins.*got {len(lengths)}"):
            pack_lengths(lengths, 50, algorithm=algorithm, min_bins=min_bins, bin_multiple=multiple)
        return
    bins = pack_lengths(lengths, 50, algorithm=algorithm, min_bins=min_bins, bin_multiple=multiple)
    assert len(bins) == wanted
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[item] for item in members) <= 50 for members in bins)


def test_heaviest_bin_of_two_or_more_is_split_longest_first():
    # bins [[0], [1, 2, 3]] of 9 and 8: the single item cannot be split, the other can
    assert pack_lengths([9, 4, 3, 1], 9, min_bins=3) == [[0], [1], [2, 3]]


def test_no_lengths_give_no_bins():
    assert pack_lengths([], 8, min_bins=4, bin_multiple=2) == []


@pytest.mark.parametrize(("lengths", "numbers"), [([3, 9, 2], ("[1]", "9", "8")), ([4, 0], ("[1]", "0", "8"))])
def test_length_outside_capacity_is_refused_with_index_length_and_capacity(lengths, numbers):
    with pytest.raises(ValueError) as caught:
        pack_lengths(lengths, 8)
    assert all(number in str(caught.value) for number in numbers)


def test_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"bfd, concatenative, ffd.*'next'"):
        pack_lengths([1], 8, algorithm="next")


def test_length_arithmetic_does_not_import_torch():
    import subprocess

    code = (
        "import sys, rl_core.batching as b; from rl_core.batching.bins import pack_lengths; b.karmarkar_karp([1, 2], 2);"
        " b.plan_microbatches([1], token_budget=2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
