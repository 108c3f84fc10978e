"""What the filters keep."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.filtering import down_sample, informative_groups, overlong_filter, sequence_error_mask


def test_informative_groups_differ_in_valid_raw_rewards():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 5.0, 0.0, 0.1])
    group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    valid = torch.tensor([True, True, True, True, True, False, True, True])
    found = informative_groups(rewards, group_ids, valid=valid)
    assert found.tolist() == [False, False, True, True, False, False, True, True]
    assert informative_groups(rewards, group_ids, valid=valid, min_std=0.1).tolist()[6:] == [False, False]
    equal = torch.full((6,), 0.1)
    assert not informative_groups(equal, torch.zeros(6, dtype=torch.int64)).any()


def test_overlong_rows_train_nothing_and_may_stay_in_the_baseline():
    valid, truncated = torch.tensor([True, True, False]), torch.tensor([False, True, False])
    assert [t.tolist() for t in overlong_filter(valid, truncated)] == [[True, False, False]] * 2
    kept, sample_mask = overlong_filter(valid, truncated, keep_in_baseline=True)
    assert kept.tolist() == [True, True, False] and sample_mask.tolist() == [True, False, False]


def test_rows_with_large_log_probability_errors_are_masked():
    train = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, float("nan")]])
    rollout = torch.tensor([[0.1, -0.1], [0.0, -2.0], [-9.0, -9.0], [0.1, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False], [True, False]])
    found = sequence_error_mask(rollout, train, mask, threshold=1.2)
    assert found.tolist() == [True, False, False, True]


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(st.integers(0, 5), min_size=1, max_size=7), keep=st.integers(1, 7))
def test_spread_keeps_the_subset_of_largest_variance(rewards, keep):
    tensor = torch.tensor(rewards, dtype=torch.float32)
    kept = down_sample(tensor, torch.zeros(len(rewards), dtype=torch.int64), keep=keep)
    assert kept.sum().item() == min(keep, len(rewards))

    def variance(values):
        return torch.tensor(values, dtype=torch.float64).var(correction=0).item()

    best = max(variance(choice) for choice in itertools.combinations(rewards, min(keep, len(rewards))))
    assert variance([r for r, k in zip(rewards, kept.tolist(), strict=True) if k]) == pytest.approx(best)


def test_spread_breaks_ties_by_smallest_k_then_lowest_row():
    group = torch.zeros(4, dtype=torch.int64)
    assert down_sample(torch.ones(4), group, keep=2).tolist() == [True, True, False, False]
    assert down_sample(torch.tensor([1.0, 0.0, 0.0, 1.0]), group, keep=2).tolist() == [True, True, False, False]
    assert down_sample(torch.tensor([0.0, 1.0, 1.0, 2.0]), group, keep=3).tolist() == [True, True, False, True]


def test_down_sampling_counts_valid_rows_per_group():
    rewards = torch.tensor([0.0, 1.0, float("nan"), 0.0, 5.0, 9.0])
    group_ids = torch.tensor([7, 3, 7, 3, 7, 7])
    valid = torch.tensor([True, True, False, True, True, True])
    assert down_sample(rewards, group_ids, keep=2, valid=valid).tolist() == [True, True, False, True, False, True]


def test_random_down_sampling_is_drawn_from_the_generator():
    rewards, group_ids = torch.arange(8.0), torch.tensor([0, 1] * 4)
    draws = [
        down_sample(
            rewards, group_ids, keep=2, strategy="random", generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed in (1, 1, 2, 3, 4)
    ]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) > 1
    assert all(sum(draw[0::2]) == sum(draw[1::2]) == 2 for draw in draws)
    with pytest.raises(ValueError, match="generator"):
        down_sample(rewards, group_ids, keep=2, strategy="random")
    with pytest.raises(ValueError, match="spread, random"):
        down_sample(rewards, group_ids, keep=2, strategy="best")
