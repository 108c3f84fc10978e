"""Micro-batches: within the budget, equally many on every rank, back in input order."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batching.microbatch import _best_fit, plan_microbatches


class Ranks:
    """Data-parallel ranks as threads in lockstep: `agree` is a real maximum over all of them."""

    def __init__(self, size):
        self.values = [0] * size
        self.barrier = Barrier(size, timeout=60)
        self.calls = [0] * size

    def agree(self, rank):
        def maximum(value):
            self.calls[rank] += 1
            self.values[rank] = value
            self.barrier.wait()
            largest = max(self.values)
            self.barrier.wait()
            return largest

        return maximum

    def plan(self, lengths, **options):
        with ThreadPoolExecutor(len(lengths)) as pool:
            jobs = [
                pool.submit(plan_microbatches, mine, agree=self.agree(rank), **options)
                for rank, mine in enumerate(lengths)
            ]
            return [job.result() for job in jobs]


LENGTHS = st.lists(st.integers(1, 30), max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    budget=st.integers(30, 70),
)
def test_all_ranks_get_equally_many_lists_within_the_budget(lengths, budget):
    ranks = Ranks(len(lengths))
    plans = ranks.plan(lengths, token_budget=budget)
    counts = {len(plan) for plan in plans}
    assert len(counts) == 1 and counts.pop() >= 1
    assert len(set(ranks.calls)) == 1  # a rank that asks more often than another would hang a collective
    for mine, plan in zip(lengths, plans, strict=True):
        assert sorted(row for rows in plan for row in rows) == list(range(len(mine)))
        assert all(sum(mine[row] for row in rows) <= budget for rows in plan)


def test_count_rises_until_balanced_parts_fit():
    # two bins of 10 exist (6+4, 3+3+4), but differencing makes 10 and 10 or worse; whatever it makes must fit
    lengths = [6, 4, 4, 3, 3]
    plan = plan_microbatches(lengths, token_budget=10)
    assert all(sum(lengths[row] for row in rows) <= 10 for rows in plan)


def test_rank_without_rows_gets_empty_lists():
    first, second = Ranks(2).plan([[5, 5, 5], []], token_budget=5)
    assert sorted(first) == [[0], [1], [2]] and second == [[], [], []]


def test_row_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"lengths\[1\].*token_budget 8.*got 9"):
        plan_microbatches([3, 9], token_budget=8)


def test_outputs_return_to_input_order():
    lengths = [9, 2, 7, 7, 1, 8]
    plan = plan_microbatches(lengths, token_budget=12)
    order = [row for rows in plan for row in rows]
    shuffled = [lengths[row] for row in order]
    assert [shuffled[order.index(row)] for row in range(len(lengths))] == lengths


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), capacity=st.integers(40, 90))
def test_the_bins_counted_are_those_of_best_fit_decreasing(lengths, capacity):
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, used in enumerate(bins) if used + length <= capacity]
        if fitting:
            bins[max(fitting, key=bins.__getitem__)] += length
        else:
            bins.append(length)
    assert _best_fit(np.array(lengths, np.int64), capacity) == len(bins)


def test_length_arithmetic_does_not_import_torch():
    code = (
        "import sys; from rl_core.batching.balance import karmarkar_karp; from rl_core.batching.microbatch import _best_fit, plan_microbatches;"
        " karmarkar_karp([1, 2], 2); plan_microbatches([1], token_budget=2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
