"""Balance: worked examples, optimality against brute force where it is cheap, order and determinism."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batching import kernels
from rl_core.batching.balance import (
    karmarkar_karp,
    load_ratio,
    sequence_costs,
    split_evenly,
)

COSTS = st.lists(st.integers(0, 200).map(float), max_size=40)


def test_cost_of_a_transformer_weighs_attention():
    assert sequence_costs([4096], quadratic=1 / (12 * 1024)) == [pytest.approx(5461.3, abs=0.05)]
    assert sequence_costs([3, 5], linear=2.0) == [6.0, 10.0]


def test_largest_differencing_known_example():
    # Karmarkar and Karp on 8, 7, 6, 5, 4: 8-7 -> 1, 6-5 -> 1, 4-1 -> 3, 3-1 -> 2: sums 16 and 14 (the optimum is 15, 15)
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in parts) == [14, 16]


@settings(max_examples=100, deadline=None)
@given(costs=COSTS, parts=st.integers(1, 9))
def test_every_item_is_in_one_part_and_order_is_canonical(costs, parts):
    found = karmarkar_karp(costs, parts)
    assert len(found) == parts
    assert sorted(item for part in found for item in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in found)
    keys = [(-sum(costs[item] for item in part), part[0] if part else len(costs)) for part in found]
    assert keys == sorted(keys)


@settings(max_examples=100, deadline=None)
@given(costs=COSTS, parts=st.integers(1, 9))
def test_no_part_is_empty_while_there_are_enough_items(costs, parts):
    assert sum(bool(part) for part in karmarkar_karp(costs, parts)) == min(parts, len(costs))


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 60).map(float), min_size=1, max_size=7), parts=st.integers(2, 3))
def test_differencing_is_within_a_third_of_the_optimum(costs, parts):
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == part) for part in range(parts))
        for owners in product(range(parts), repeat=len(costs))
    )
    heaviest = sum(costs[item] for item in karmarkar_karp(costs, parts)[0])
    assert heaviest <= best * (4 / 3) + 1e-9


def reference_differencing(costs, parts, equal_size):
    """The method on whole tuples, written for reading."""
    empty = (0.0, len(costs), ())
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    size = parts if equal_size else 1
    states = [
        [(costs[item], item, (item,)) for item in order[start : start + size]] + [empty] * (parts - size)
        for start in range(0, len(order), size)
    ]
    while len(states) > 1:
        states.sort(key=lambda state: (state[-1][0] - state[0][0], min(bag[1] for bag in state)))
        left, right, *states = states
        joined = [
            (a[0] + b[0], min(a[1], b[1]), tuple(sorted(a[2] + b[2]))) for a, b in zip(left, right[::-1], strict=True)
        ]
        states.append(sorted(joined, key=lambda bag: (-bag[0], bag[1])))
    return [list(bag[2]) for bag in sorted(states[0], key=lambda bag: (-bag[0], bag[1]))] if states else [[]] * parts


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 40).map(float), max_size=24), parts=st.integers(2, 5), equal_size=st.booleans())
def test_result_is_that_of_the_readable_method(costs, parts, equal_size):
    costs = costs[: len(costs) // parts * parts] if equal_size else costs
    assert karmarkar_karp(costs, parts, equal_size=equal_size) == reference_differencing(costs, parts, equal_size)


@pytest.mark.parametrize("equal_size", [False, True])
def test_compiled_and_plain_differencing_agree_bit_for_bit(equal_size):
    costs = np.random.default_rng(3).lognormal(6, 1, 640)
    order = np.argsort(-costs, kind="stable")
    arguments = (costs, order, 8, 8 if equal_size else 1)
    plain = kernels.largest_differencing(*arguments)
    assert len(costs) > kernels.COMPILE_ABOVE
    np.testing.assert_array_equal(kernels.compiled(kernels.largest_differencing)(*arguments), plain)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 8), parts=st.integers(1, 6), data=st.data())
def test_equal_size_gives_equally_many_members(rows, parts, data):
    costs = data.draw(st.lists(st.integers(0, 90).map(float), min_size=rows * parts, max_size=rows * parts))
    assert [len(part) for part in karmarkar_karp(costs, parts, equal_size=True)] == [rows] * parts


def test_equal_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="5 items in 2 parts"):
        karmarkar_karp([1.0] * 5, 2, equal_size=True)


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [1.0, -2.0], [1.0, float("inf")]])
def test_cost_that_is_no_cost_is_refused(costs):
    with pytest.raises(ValueError, match=r"costs\[1\]"):
        karmarkar_karp(costs, 2)


def test_parts_below_one_are_refused():
    for split in (karmarkar_karp, split_evenly):
        with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
            split([1.0], 0)


def test_load_ratio_counts_empty_parts_and_zero_costs():
    assert load_ratio([4.0, 2.0], [[0], [1], []]) == 2.0
    assert load_ratio([0.0], [[0], []]) == 1.0


def test_even_split_is_contiguous_larger_first():
    assert split_evenly([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert split_evenly([1], 2) == [[1], []]
