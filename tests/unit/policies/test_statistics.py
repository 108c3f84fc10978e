"""The statistics of observations that a policy normalizes by: those of all rows so far, over all data ranks."""

import threading

import numpy as np
import pytest
import torch

from rl_core.policies.mlp import MLPPolicy


def policy():
    torch.manual_seed(0)
    return MLPPolicy(observation_size=3, action_dim=2, hidden=[8], normalize=True)


def batches(rng):
    return [rng.normal([5, -2, 0], [0.1, 30, 1], (rows, 3)).astype(np.float32) for rows in (40, 1, 300)]


def test_mean_and_variance_are_those_of_all_rows():
    mine, given = policy(), batches(np.random.default_rng(1))
    for batch in given:
        mine.update_statistics({"states": torch.from_numpy(batch)}, None)
    rows = np.concatenate([np.asarray(batch, np.float64) for batch in given])
    assert mine.count.item() == len(rows)
    assert mine.mean.tolist() == pytest.approx(rows.mean(0).tolist(), rel=1e-5, abs=1e-6)
    assert mine.variance.tolist() == pytest.approx(rows.var(0).tolist(), rel=1e-4)


def test_two_data_ranks_get_the_statistics_of_one():
    rng = np.random.default_rng(2)
    whole, halves = policy(), [policy(), policy()]
    barrier, parts = threading.Barrier(2), [None, None]

    def reduce_of(rank):
        def reduce(tensor):
            parts[rank] = tensor
            barrier.wait(10)
            total = parts[0] + parts[1]
            barrier.wait(10)
            return total

        return reduce

    for batch in batches(rng):
        states = torch.from_numpy(batch)
        whole.update_statistics({"states": states}, None)
        threads = [
            threading.Thread(target=half.update_statistics, args=({"states": states[rank::2]}, reduce_of(rank)))
            for rank, half in enumerate(halves)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for half in halves:
        for name, buffer in whole.named_buffers():
            assert torch.allclose(buffer, getattr(half, name), rtol=1e-6)


def test_networks_see_normalized_states_and_an_empty_step_changes_nothing():
    mine = policy()
    states = torch.tensor([[5.2, -32.0, 1e6]])
    mine.update_statistics({"states": torch.zeros(0, 3)}, None)
    assert mine.mean.tolist() == [0, 0, 0] and mine.variance.tolist() == [1, 1, 1]
    plain = MLPPolicy(observation_size=3, action_dim=2, hidden=[8])
    plain.load_state_dict({name: value for name, value in mine.state_dict().items() if name in plain.state_dict()})
    mine.mean.copy_(torch.tensor([5.0, -2.0, 0.0]))
    mine.variance.copy_(torch.tensor([0.01, 900.0, 1.0]))
    seen = torch.tensor([[2.0, -1.0, 10.0]])
    for mine_out, plain_out in zip(mine.networks(states), plain.networks(seen), strict=True):
        assert torch.allclose(mine_out, plain_out, atol=1e-4)
