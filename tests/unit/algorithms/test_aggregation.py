"""Aggregation, counts and Stats: the worked example, and shares that add up to the whole."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.aggregation import (
    AGGREGATIONS,
    LossNormalizers,
    aggregate,
    count_normalizers,
)
from rl_core.algorithms.stats import Stat, extreme_stat, finish_stats, merge_stats

VALUES = torch.tensor([[2.0, 4.0, 9.0], [6.0, 1.0, 1.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.0),
        ("seq-mean-token-sum", 6.0),
        ("seq-mean-token-mean", 4.5),
        ("seq-mean-token-sum-norm", 12.0 / (2 * 8)),
    ],
)
def test_worked_example(mode, expected):
    assert aggregate(VALUES, MASK, mode=mode, max_tokens=8).item() == pytest.approx(expected)


def test_shares_of_micro_batches_add_up():
    counts = LossNormalizers(tokens=3, sequences=2)
    shares = [aggregate(VALUES[i : i + 1], MASK[i : i + 1], normalizers=counts).item() for i in range(2)]
    assert shares == [2.0, 2.0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 12), width=st.integers(1, 9), cuts=st.lists(st.integers(0, 12)))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_cut_sums_to_the_whole(mode, seed, rows, width, cuts):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) > 0.4
    counts = count_normalizers(mask)
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    parts = [
        aggregate(values[a:b], mask[a:b], mode=mode, normalizers=counts, max_tokens=16)
        for a, b in itertools.pairwise(edges)
    ]
    whole = aggregate(values, mask, mode=mode, max_tokens=16)
    torch.testing.assert_close(sum(parts), whole, atol=1e-6, rtol=1e-6)


def test_counts_are_reduced_once_over_ranks():
    calls = []

    def reduce(counts):
        calls.append(counts.clone())
        return counts * 2

    assert count_normalizers(MASK, reduce=reduce) == LossNormalizers(tokens=6.0, sequences=4.0)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_all_masked_batch_is_zero_attached_to_the_graph(mode):
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    total = aggregate(values, torch.zeros(2, 3, dtype=torch.bool), mode=mode, max_tokens=4)
    total.backward()
    assert total.item() == 0.0
    assert values.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_rows_are_accepted(mode):
    assert aggregate(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), mode=mode, max_tokens=4).item() == 0.0


def test_zero_global_counts_divide_by_one():
    nothing = LossNormalizers(tokens=0, sequences=0)
    assert aggregate(VALUES, torch.zeros_like(MASK), normalizers=nothing).item() == 0.0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="token-mean, seq-mean"):
        aggregate(VALUES, MASK, mode="mean")
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate(VALUES, MASK, mode="seq-mean-token-sum-norm")
    with pytest.raises(TypeError, match=r"mask must be bool, got torch.int64"):
        aggregate(VALUES, MASK.long())
    with pytest.raises(TypeError, match=r"values.*float16"):
        aggregate(VALUES.half(), MASK)
    with pytest.raises(ValueError, match=r"values and mask.*\(2, 3\) and \(1, 3\)"):
        aggregate(VALUES, MASK[:1])


def test_rows_of_any_further_dimensions():
    chunks = torch.arange(8.0).reshape(2, 2, 2)
    mask = torch.ones(2, 2, 2, dtype=torch.bool)
    assert aggregate(chunks, mask, mode="seq-mean-token-sum").item() == 14.0
    assert aggregate(torch.tensor([1.0, 3.0]), torch.tensor([True, True])).item() == 2.0


def test_stats_merge_before_ratios_are_formed():
    parts = [
        {"a": Stat("mean", 3.0, 1), "s": Stat("sum", 2.0, 1), "hi": Stat("max", 5.0, 2), "lo": Stat("min", 1.0, 2)},
        {"a": Stat("mean", 3.0, 2), "s": Stat("sum", 0.5, 1), "hi": Stat("max", 4.0, 2), "lo": Stat("min", 3.0, 2)},
    ]
    merged = merge_stats(parts)
    assert {name: float(stat) for name, stat in merged.items()} == {"a": 2.0, "s": 2.5, "hi": 5.0, "lo": 1.0}
    assert finish_stats(merged) == {"a": 2.0, "s": 2.5, "hi": 5.0, "lo": 1.0}
    assert merge_stats(parts)["a"].total.dtype == torch.float64


def test_mean_of_nothing_is_zero_and_extremes_of_nothing_are_not_reported():
    empty = torch.zeros(2, dtype=torch.bool)
    stats = {"m": Stat("mean", 0.0, 0), "hi": extreme_stat("max", torch.ones(2), empty)}
    assert float(stats["m"]) == 0.0
    assert set(merge_stats([stats])) == {"m"}
    assert finish_stats(stats) == {"m": 0.0}
    assert merge_stats([]) == finish_stats({}) == {}


@pytest.mark.parametrize("kind", ["mean", "std", "sum", "max", "min"])
@pytest.mark.parametrize("numbers", [(float("nan"), 1.0), (1.0, float("nan"))], ids=["first", "last"])
def test_a_number_that_is_none_is_seen_in_the_whole(kind, numbers):
    squares = {"squares": torch.tensor(1.0)} if kind == "std" else {}
    parts = [{"a": Stat(kind, number, 1, **squares)} for number in numbers]
    assert torch.isnan(merge_stats(parts)["a"].total)
    infinite = [{"a": Stat("sum", number, 1)} for number in (float("inf"), float("-inf"))]
    assert torch.isnan(merge_stats(infinite)["a"].total)


def test_stat_holds_no_graph_and_one_kind_per_name():
    assert not Stat("mean", torch.ones(1, requires_grad=True).sum(), 1).total.requires_grad
    with pytest.raises(ValueError, match="median"):
        Stat("median", 0.0, 1)
    with pytest.raises(ValueError, match="'a'.*max, mean"):
        merge_stats([{"a": Stat("mean", 0.0, 1)}, {"a": Stat("max", 0.0, 1)}])
