"""REINFORCE++ and whitening: suffix sums over trainable tokens, one whitening over all ranks."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.advantages import clip_advantages, reinforce_plus_plus_advantages, whiten
from rl_core.algorithms.kl import kl_penalty


class Ranks:
    """Runs one function per simulated rank in threads; `reduce` sums what the ranks bring, in rank order."""

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.brought, self.calls = [None] * size, [0] * size

    def reduce_of(self, rank):
        def reduce(value):
            self.calls[rank] += 1
            self.brought[rank] = value
            self.barrier.wait()
            total = torch.stack(self.brought).sum(0)
            self.barrier.wait()
            return total

        return reduce

    def run(self, function):
        results = [None] * self.size

        def work(rank):
            results[rank] = function(rank, self.reduce_of(rank))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_whiten_example():
    values = torch.tensor([[0.5, 0.5, 0.5], [2.0, 2.0, 99.0], [-1.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    expected = [[-0.242536] * 3, [1.212678, 1.212678, 0.0], [-1.697749, 0.0, 0.0]]
    torch.testing.assert_close(whiten(values, mask), torch.tensor(expected), atol=1e-6, rtol=0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), ranks=st.sampled_from([2, 4]))
def test_whitening_over_ranks_equals_whitening_the_whole(seed, ranks):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(8, 5, generator=generator) * 3 + 100
    mask = torch.rand(8, 5, generator=generator) > 0.3
    mask[: 8 // ranks] = False  # the first rank has no token at all
    group = Ranks(ranks)
    parts = group.run(lambda rank, reduce: whiten(values.chunk(ranks)[rank], mask.chunk(ranks)[rank], reduce=reduce))
    torch.testing.assert_close(torch.cat(parts), whiten(values, mask), atol=1e-6, rtol=0)
    assert group.calls == [2] * ranks


def test_whitening_nothing_gives_zeros_and_constant_values_too():
    values = torch.full((2, 2), float("nan"))
    assert whiten(values, torch.zeros(2, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]] * 2
    assert whiten(torch.full((2, 2), 7.0), torch.ones(2, 2, dtype=torch.bool)).abs().max().item() == 0.0


def test_without_kl_every_token_gets_the_rows_reward():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    result = reinforce_plus_plus_advantages(torch.tensor([2.0, -1.0]), mask, whiten=False)
    assert result.advantages.tolist() == [[2.0, 0.0, 2.0], [-1.0, -1.0, 0.0]]
    whitened = reinforce_plus_plus_advantages(torch.tensor([2.0, -1.0]), mask)
    torch.testing.assert_close(whitened.advantages, whiten(result.advantages, mask))
    torch.testing.assert_close(whitened.returns, result.advantages)


def test_kl_is_taken_off_each_token_and_summed_to_the_end():
    mask = torch.tensor([[False, True, True, False, True]])
    log_probs = torch.tensor([[float("nan"), -1.0, -2.0, float("nan"), -0.5]])
    reference = torch.tensor([[float("nan"), -1.5, -1.0, float("nan"), -0.7]])
    kl = kl_penalty(log_probs[mask], reference[mask], estimator="k1")
    result = reinforce_plus_plus_advantages(
        torch.tensor([1.0]), mask, log_probs=log_probs, ref_log_probs=reference, kl_coefficient=0.1, whiten=False
    )
    token = -0.1 * kl
    token[-1] += 1.0
    expected = torch.stack([token.sum(), token[1:].sum(), token[2:].sum()])
    torch.testing.assert_close(result.advantages[mask], expected)
    assert result.advantages[~mask].tolist() == [0.0, 0.0]


def test_group_mean_baseline_uses_valid_rows_only():
    rewards = torch.tensor([1.0, 3.0, float("nan"), 5.0])
    group_ids = torch.tensor([0, 0, 0, 1])
    valid = torch.tensor([True, True, False, True])
    mask = torch.ones(4, 1, dtype=torch.bool)
    result = reinforce_plus_plus_advantages(
        rewards, mask, group_ids=group_ids, valid=valid, baseline="group_mean", whiten=False
    )
    assert result.advantages.flatten().tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_invalid_rows_do_not_enter_the_whitening():
    rewards = torch.tensor([1.0, 3.0, 1e6])
    mask = torch.ones(3, 2, dtype=torch.bool)
    valid = torch.tensor([True, True, False])
    result = reinforce_plus_plus_advantages(rewards, mask, valid=valid)
    assert result.advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]


def test_reinforce_mistakes_are_named():
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = torch.zeros(2)
    with pytest.raises(ValueError, match="group_ids"):
        reinforce_plus_plus_advantages(rewards, mask, baseline="group_mean")
    with pytest.raises(ValueError, match="none, group_mean, got 'mean'"):
        reinforce_plus_plus_advantages(rewards, mask, baseline="mean")
    for wrong in (mask[0], mask.unsqueeze(2)):
        with pytest.raises(ValueError, match=r"mask must have shape \[B, T\]"):
            reinforce_plus_plus_advantages(rewards, wrong)
    with pytest.raises(ValueError, match="kl_coefficient.*ref_log_probs None"):
        reinforce_plus_plus_advantages(rewards, mask, kl_coefficient=0.1, log_probs=torch.zeros(2, 2))


def test_clip_advantages():
    values = torch.tensor([[-3.0, 0.5, 3.0]])
    assert clip_advantages(values, low=-1.0, high=2.0).tolist() == [[-1.0, 0.5, 2.0]]
    assert clip_advantages(values, high=1.0).tolist() == [[-3.0, 0.5, 1.0]]
    assert clip_advantages(values).tolist() == values.tolist()
    with pytest.raises(ValueError, match="low must be <= high"):
        clip_advantages(values, low=1.0, high=-1.0)
    with pytest.raises(TypeError, match=r"advantages must be float32"):
        clip_advantages(values.double(), low=-1.0)
