"""Routing covers every row once, both sides agree without talking, splitting and merging are inverses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.collective.routing import get_dst_ranks, get_src_ranks, merge_batches, split_batch

sides = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))


def test_worked_example():
    assert [get_dst_ranks(20, 5, 2, source) for source in range(5)] == [
        [(0, 4)], [(0, 4)], [(0, 2), (1, 2)], [(1, 4)], [(1, 4)],
    ]  # fmt: skip


@given(sides)
def test_every_row_goes_to_the_rank_that_owns_it(case):
    sources, destinations, factor = case
    batch = sources * destinations * factor
    for source in range(sources):
        row = source * batch // sources
        for destination, count in get_dst_ranks(batch, sources, destinations, source):
            owners = {(row + step) // (batch // destinations) for step in range(count)}
            assert owners == {destination} and count > 0
            row += count
        assert row == (source + 1) * batch // sources


@given(sides)
def test_both_sides_agree(case):
    sources, destinations, factor = case
    batch = sources * destinations * factor
    sent = {(s, d, n) for s in range(sources) for d, n in get_dst_ranks(batch, sources, destinations, s)}
    got = {(s, d, n) for d in range(destinations) for s, n in get_src_ranks(batch, sources, destinations, d)}
    assert sent == got


@pytest.mark.parametrize(("batch", "sources", "destinations"), [(10, 4, 2), (10, 2, 4), (0, 1, 1), (4, 0, 1)])
def test_a_batch_that_does_not_divide_is_refused(batch, sources, destinations):
    with pytest.raises(ValueError, match="divisible by both numbers of ranks"):
        get_dst_ranks(batch, sources, destinations, 0)


def test_a_rank_outside_is_refused():
    with pytest.raises(ValueError, match=r"dst must be in \[0, 2\), got 2"):
        get_src_ranks(4, 4, 2, 2)


def test_split_and_merge_are_inverses_for_nested_batches():
    batch = {
        "ids": torch.arange(12).reshape(6, 2),
        "rewards": np.arange(6.0),
        "text": list("abcdef"),
        "extra": {"pair": tuple(range(6))},
    }
    parts = split_batch(batch, [1, 3, 0, 2])
    assert [len(part["text"]) for part in parts] == [1, 3, 0, 2]
    assert parts[1]["ids"].data_ptr() == batch["ids"][1:].data_ptr()
    merged = merge_batches(parts, [1, 3, 0, 2])
    assert torch.equal(merged["ids"], batch["ids"]) and np.array_equal(merged["rewards"], batch["rewards"])
    assert merged["text"] == batch["text"] and merged["extra"] == batch["extra"]


def test_errors_name_key_source_expected_and_found():
    with pytest.raises(ValueError, match=r"extra\.x must have 3 rows to be split, got 2"):
        split_batch({"a": [1, 2, 3], "extra": {"x": [1, 2]}}, [1, 2])
    with pytest.raises(ValueError, match="a from source 1 must have 2 rows, got 1"):
        merge_batches([{"a": [1]}, {"a": [2]}], [1, 2])
    with pytest.raises(ValueError, match=r"extra\.x from source 1 must have 1 rows, got 2"):
        merge_batches([{"a": [1, 2], "extra": {"x": [1, 2]}}, {"a": [3], "extra": {"x": [3, 4]}}])
    with pytest.raises(ValueError, match="from source 1 must have the keys"):
        merge_batches([{"a": [1]}, {"b": [2]}])
    with pytest.raises(ValueError, match="at least one part"):
        merge_batches([])
    with pytest.raises(ValueError, match="one size per part"):
        merge_batches([[1]], [1, 2])
    with pytest.raises(ValueError, match="must have rows"):
        split_batch({"a": 3}, [1])
