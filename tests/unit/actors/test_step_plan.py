"""Rows are dealt to optimizer steps and ranks as a bijection that the number of ranks does not change."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.actors.ranks import ParallelSizes, Ranks
from rl_core.actors.rows import Columns, StepRows, move_rows, natural_key, number_rows
from rl_core.actors.step_plan import plan_pass

ALONE = Ranks(ParallelSizes(data=1), rank=0, device=torch.device("cpu"))


def plan(lengths, **changes):
    options = {"minibatches": 1, "ranks": 1, "hidden_size": 64, "balance": True, "seed": (0, 1, 0)} | changes
    return plan_pass(lengths, **options)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=0, max_size=40),
    minibatches=st.integers(1, 4),
    ranks=st.integers(1, 4),
    balance=st.booleans(),
)
def test_every_row_trains_once_on_its_rank_and_ranks_do_not_change_the_minibatches(
    lengths, minibatches, ranks, balance
):
    ours = plan(lengths, minibatches=minibatches, ranks=ranks, balance=balance)
    alone = plan(lengths, minibatches=minibatches)
    assert len(ours.minibatches) == minibatches
    dealt = [(row, rank) for cut in ours.minibatches for rank, rows in enumerate(cut) for row in rows]
    assert sorted(row for row, _ in dealt) == list(range(len(lengths)))
    assert all(ours.destination[row] == rank for row, rank in dealt)
    together = [sorted(row for rows in cut for row in rows) for cut in ours.minibatches]
    assert together == [cut[0] for cut in alone.minibatches]


def test_shuffling_follows_seed_step_and_pass():
    lengths = [1] * 64
    plans = {
        seed: plan(lengths, minibatches=4, seed=seed).minibatches
        for seed in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    }
    assert plan(lengths, minibatches=4, seed=(0, 1, 0)).minibatches == plans[0, 1, 0]
    assert len({str(cut) for cut in plans.values()}) == 4


def test_balance_evens_out_the_cost():
    lengths = [400, 10, 10, 390, 10, 10, 380, 10]
    assert plan(lengths, ranks=2).imbalance < plan(lengths, ranks=2, balance=False).imbalance


def test_groups_are_ordered_by_number_not_by_text_or_arrival():
    assert sorted(["1-2", "0-10", "0-9"], key=natural_key) == ["0-9", "0-10", "1-2"]
    all_lengths, numbers = number_rows(ALONE, ["0-10", "0-9"], [0, 0, 1], [5, 6, 7])
    assert numbers == [1, 2, 0]
    assert all_lengths == [7, 5, 6]


class GatheredRanks:
    """Data ranks whose gathered rows are given."""

    def __init__(self, rank, held):
        self.data_rank, self.held = rank, held

    def gather_over_data_ranks(self, mine):
        assert mine == self.held[self.data_rank]
        return self.held


GROUPS = st.lists(st.sampled_from(["1-2", "1-02", "0-10", "0-9", "a"]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(
        GROUPS.flatmap(
            lambda texts: st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(1, 9)), max_size=6).map(
                lambda rows: [texts, [group for group, _ in rows], [length for _, length in rows]]
            )
        ),
        min_size=1,
        max_size=3,
    )
)
def test_rows_of_several_ranks_are_numbered_by_group_then_rank_then_place(held):
    rows = [
        (natural_key(texts[group]), rank, place, length)
        for rank, (texts, groups, lengths) in enumerate(held)
        for place, (group, length) in enumerate(zip(groups, lengths, strict=True))
    ]
    rows.sort(key=lambda row: row[:3])
    for rank, part in enumerate(held):
        all_lengths, numbers = number_rows(GatheredRanks(rank, held), *part)
        assert all_lengths == [length for *_, length in rows]
        assert [rows[number][1:3] for number in numbers] == [(rank, place) for place in range(len(part[1]))]


def rows_of(numbers, lengths):
    width = max(lengths)
    ids = torch.arange(len(lengths) * width).view(len(lengths), width)
    return StepRows(numbers=numbers, lengths=lengths, columns=Columns(input_ids=ids, loss_mask=ids % 2 == 0))


def test_one_rank_keeps_its_rows_by_ascending_number():
    moved = move_rows(ALONE, rows_of([2, 0, 1], [1, 3, 2]), [0, 0, 0])
    assert (moved.numbers, moved.lengths) == ([0, 1, 2], [3, 2, 1])
    assert moved.columns.input_ids.tolist() == [[3, 4, 5], [6, 7, 8], [0, 1, 2]]


def test_taken_rows_are_no_wider_than_the_longest():
    taken = rows_of([0, 1, 2], [1, 3, 2]).take([2, 0])
    assert taken.columns.input_ids.tolist() == [[6, 7], [0, 1]]
    assert rows_of([0], [3]).take([]).columns.input_ids.shape == (0, 1)


def test_the_masked_row_trains_nothing():
    row = rows_of([0], [3]).masked_row()
    assert row.lengths == [1] and not row.columns.loss_mask.any()
    assert row.columns.input_ids.dtype == torch.int64


def test_the_masked_row_of_a_policy_has_as_many_scores_as_its_other_rows():
    rows = replace(rows_of([0, 1], [3, 3]), inputs={"states": torch.ones(2, 4)})
    row = rows.masked_row()
    assert row.lengths == [3] and row.columns.loss_mask.shape == (1, 3) and not row.columns.loss_mask.any()
    assert row.inputs["states"].shape == (1, 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match="rank must be in"):
        Ranks(ParallelSizes(data=2), rank=rank, device=torch.device("cpu"))
