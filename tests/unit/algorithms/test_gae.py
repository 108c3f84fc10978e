"""GAE on tokens and on embodied steps against a plain loop; embodied helpers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.advantages import (
    action_log_probs,
    embodied_gae_advantages,
    embodied_loss_mask,
    episode_scores,
    gae_advantages,
)


def test_worked_example():
    rewards, values = torch.tensor([[0.0, 0.5, 2.0]]), torch.tensor([[1.0, 0.4, 1.2]])
    result = gae_advantages(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.8, lam=0.5)
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.128, 1.38, 0.8]]))
    torch.testing.assert_close(result.returns, torch.tensor([[0.872, 1.78, 2.0]]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.8, 0.0]))
def test_masked_tokens_neither_cut_nor_discount(seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(4, 9, generator=generator) for _ in range(2))
    bootstrap = torch.randn(4, generator=generator)
    mask = torch.rand(4, 9, generator=generator) > 0.4
    mask[0] = False
    hidden = [torch.where(mask, tensor, float("nan")) for tensor in (rewards, values)]
    result = gae_advantages(*hidden, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap)
    expected, targets = torch.zeros(4, 9), torch.zeros(4, 9)
    for row in range(4):
        following, carried = bootstrap[row].item(), 0.0
        for t in reversed(range(9)):
            if mask[row, t]:
                delta = rewards[row, t].item() + gamma * following - values[row, t].item()
                carried = delta + gamma * lam * carried
                following = values[row, t].item()
                expected[row, t], targets[row, t] = carried, carried + following
    torch.testing.assert_close(result.advantages, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.returns, targets, atol=1e-5, rtol=1e-5)


def test_without_values_returns_are_undiscounted_sums():
    rewards = torch.tensor([[1.0, 0.0, 2.0]])
    result = gae_advantages(rewards, None, torch.tensor([[True, False, True]]))
    assert result.advantages.tolist() == [[3.0, 0.0, 2.0]]
    with pytest.raises(ValueError, match="gamma and lam must be 1 without values, got 0.9"):
        gae_advantages(rewards, None, torch.ones(1, 3, dtype=torch.bool), gamma=0.9)


def test_no_rows_and_no_columns():
    for shape in ((0, 3), (2, 0)):
        assert (
            gae_advantages(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape).bool()).advantages.shape == shape
        )


def embodied_loop(rewards, values, ended, gamma, lam):
    rows, steps = rewards.shape
    expected = torch.zeros(rows, steps)
    for row in range(rows):
        carried = 0.0
        for t in reversed(range(steps)):
            alive = 0.0 if ended[row, t] else 1.0
            delta = rewards[row, t] + gamma * values[row, t + 1] * alive - values[row, t]
            carried = delta + gamma * lam * alive * carried
            expected[row, t] = carried
    return expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.sampled_from(["chunk", "action"]))
def test_embodied_gae_is_cut_by_dones(seed, level):
    generator = torch.Generator().manual_seed(seed)
    rows, chunks, sub = 3, 5, 2
    rewards = torch.randn(rows, chunks, sub, generator=generator)
    dones = torch.rand(rows, chunks + 1, sub, generator=generator) > 0.8
    steps = chunks if level == "chunk" else chunks * sub
    values = torch.randn(rows, steps + 1, generator=generator)
    result = embodied_gae_advantages(rewards, values, dones, gamma=0.9, lam=0.7, level=level)
    by_step = rewards.sum(2) if level == "chunk" else rewards.flatten(1)
    ended = dones[:, 1:].any(2) if level == "chunk" else dones[:, 1:].flatten(1)
    expected = embodied_loop(by_step, values, ended, 0.9, 0.7)
    torch.testing.assert_close(result.advantages, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.returns, expected + values[:, :-1], atol=1e-5, rtol=1e-5)


DONES = torch.tensor([[[False, False], [False, True], [False, False]], [[False, True], [False, False], [False, False]]])


def test_embodied_mask_ends_with_the_done_step():
    mask, steps = embodied_loss_mask(DONES)
    assert mask.tolist() == [[[True, True], [False, False]], [[False, False], [False, False]]]
    assert steps.tolist() == [2, 0]
    chunk_mask, chunk_steps = embodied_loss_mask(DONES, level="chunk")
    assert chunk_mask.tolist() == [[[True], [False]], [[False], [False]]]
    assert chunk_steps.tolist() == [1, 0]


def test_episode_scores_stop_at_the_first_done():
    rewards = torch.tensor([[[1.0, 2.0], [50.0, 50.0]], [[50.0, 50.0], [50.0, 50.0]]])
    assert episode_scores(rewards, DONES).tolist() == [3.0, 0.0]


def test_action_log_probs_levels():
    log_probs = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert action_log_probs(log_probs, action_dim=2, level="token").tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert action_log_probs(log_probs, action_dim=2, level="action").tolist() == [[3.0, 7.0]]
    assert action_log_probs(log_probs, action_dim=2, level="chunk").tolist() == [10.0]
    with pytest.raises(ValueError, match="got 4 and 3"):
        action_log_probs(log_probs, action_dim=3, level="token")


def test_embodied_mistakes_are_named():
    rewards = torch.zeros(2, 2, 2)
    with pytest.raises(ValueError, match=r"values must have shape \(2, 3\)"):
        embodied_gae_advantages(rewards, torch.zeros(2, 5), DONES)
    with pytest.raises(ValueError, match="rewards .* dones"):
        embodied_gae_advantages(rewards, torch.zeros(2, 3), DONES[:, 1:])
    with pytest.raises(ValueError, match="chunk, action"):
        embodied_gae_advantages(rewards, torch.zeros(2, 3), DONES, level="token")
    with pytest.raises(ValueError, match="gamma"):
        gae_advantages(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), gamma=1.5)
