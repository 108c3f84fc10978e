"""GRPO, RLOO, raw: worked examples, groups by id, and rows that must not count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.advantages import grpo_advantages, raw_advantages, rloo_advantages

REWARDS = torch.tensor([3.0, 7.0, 8.0, 40.0])
GROUP = torch.zeros(4, dtype=torch.int64)
VALID = torch.tensor([True, True, True, False])
MASK = torch.tensor([[True, True, False]] * 4)


def per_row(result):
    return result.advantages[:, 0].tolist()


def test_group_mean_example():
    result = grpo_advantages(REWARDS, GROUP, MASK, valid=VALID)
    assert per_row(result) == pytest.approx([-1.133893, 0.377964, 0.755929, 0.0], abs=1e-6)
    assert result.advantages.dtype == torch.float32
    assert result.returns is None
    assert torch.equal(result.advantages[:, 1], result.advantages[:, 0])
    assert result.advantages[:, 2].tolist() == [0.0] * 4


def test_leave_one_out_example():
    result = grpo_advantages(REWARDS, GROUP, MASK, valid=VALID, baseline="leave_one_out")
    assert per_row(result) == pytest.approx([-1.700839, 0.566946, 1.133893, 0.0], abs=1e-6)


def test_rloo_example():
    assert per_row(rloo_advantages(REWARDS, GROUP, MASK, valid=VALID)) == pytest.approx([-4.5, 1.5, 3.0, 0.0])


def test_leave_one_out_of_a_pair_is_not_degenerate():
    result = grpo_advantages(REWARDS[:2], GROUP[:2], MASK[:2], baseline="leave_one_out")
    assert per_row(result) == pytest.approx([-4 / 8**0.5, 4 / 8**0.5], abs=1e-5)


def test_equal_rewards_give_exactly_zero():
    for scale in ("group_std", "none"):
        rewards = torch.full((7,), 0.1)
        result = grpo_advantages(rewards, torch.zeros(7, dtype=torch.int64), torch.ones(7, 2).bool(), scale=scale)
        assert result.advantages.abs().max().item() == 0.0
    assert float(result.metrics["groups/zero_std"]) == 1.0


def test_lonely_row_is_zero_and_counted_degenerate():
    result = grpo_advantages(REWARDS, torch.tensor([0, 0, 5, 5]), MASK, valid=VALID, baseline="leave_one_out")
    assert per_row(result)[2:] == [0.0, 0.0]
    assert float(result.metrics["groups/degenerate"]) == 1.0
    assert float(result.metrics["groups/total"]) == 2.0


def test_large_offset_loses_no_precision():
    rewards = torch.tensor([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3])
    expected = grpo_advantages(rewards - 1e6, GROUP, MASK)
    torch.testing.assert_close(grpo_advantages(rewards, GROUP, MASK).advantages, expected.advantages)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), baseline=st.sampled_from(["group_mean", "leave_one_out"]), scaled=st.booleans())
def test_agrees_with_a_loop_over_scattered_groups(seed, baseline, scaled):
    generator = torch.Generator().manual_seed(seed)
    rows = 12
    group_ids = torch.randint(0, 4, (rows,), generator=generator) * 1000 - 7
    rewards = torch.randint(0, 4, (rows,), generator=generator).float()
    valid = torch.rand(rows, generator=generator) > 0.25
    mask = torch.rand(rows, 5, generator=generator) > 0.3
    result = grpo_advantages(
        torch.where(valid, rewards, float("nan")),
        group_ids,
        mask,
        valid=valid,
        baseline=baseline,
        scale="group_std" if scaled else "none",
    )
    for row in range(rows):
        members = [i for i in range(rows) if group_ids[i] == group_ids[row] and valid[i]]
        scores = [rewards[i].item() for i in members]
        expected = 0.0
        if valid[row] and len(scores) > 1:
            others = [rewards[i].item() for i in members if i != row]
            base = sum(scores) / len(scores) if baseline == "group_mean" else sum(others) / len(others)
            mean = sum(scores) / len(scores)
            std = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
            expected = (rewards[row].item() - base) / ((std + 1e-6) if scaled else 1.0) if std else 0.0
        torch.testing.assert_close(result.advantages[row], mask[row] * expected, atol=1e-5, rtol=1e-5)


def test_metrics_cover_valid_rows():
    metrics = grpo_advantages(REWARDS, GROUP, MASK, valid=VALID).metrics
    found = {name: float(stat) for name, stat in metrics.items()}
    assert found["rewards/mean"] == 6.0
    assert (found["rewards/max"], found["rewards/min"]) == (8.0, 3.0)
    assert found["rewards/std"] == pytest.approx(7**0.5)
    assert (found["rows/total"], found["rows/invalid"]) == (4.0, 1.0)


def test_raw_copies_the_reward_of_valid_rows():
    result = raw_advantages(REWARDS, MASK, valid=VALID)
    assert result.advantages.tolist() == [[3.0, 3.0, 0.0], [7.0, 7.0, 0.0], [8.0, 8.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(4,), (4, 4, 2), (4, 3, 2)], ids=str)
def test_a_row_reaches_only_its_own_entries_of_a_mask_of_any_shape(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    wanted = torch.tensor([-3.0, 1.0, 2.0, 0.0]).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    result = grpo_advantages(REWARDS, GROUP, mask, valid=VALID, scale="none")
    assert torch.equal(result.advantages, wanted)
    assert raw_advantages(REWARDS, mask, valid=VALID).advantages.shape == shape


def test_inputs_stay_as_they_were():
    rewards, group_ids, mask, valid = REWARDS.clone(), GROUP.clone(), MASK.clone(), VALID.clone()
    grpo_advantages(rewards, group_ids, mask, valid=valid)
    assert torch.equal(rewards, REWARDS) and torch.equal(mask, MASK) and torch.equal(valid, VALID)


def test_no_rows_and_no_valid_rows():
    nothing = grpo_advantages(torch.zeros(0), GROUP[:0], MASK[:0])
    assert nothing.advantages.shape == (0, 3)
    assert "rewards/max" not in nothing.metrics
    invalid = grpo_advantages(torch.full((4,), float("nan")), GROUP, MASK, valid=torch.zeros(4, dtype=torch.bool))
    assert invalid.advantages.abs().sum().item() == 0.0
    assert float(invalid.metrics["rewards/mean"]) == 0.0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="group_mean, leave_one_out, got 'median'"):
        grpo_advantages(REWARDS, GROUP, MASK, baseline="median")
    with pytest.raises(ValueError, match="scale"):
        grpo_advantages(REWARDS, GROUP, MASK, scale="batch")
    with pytest.raises(TypeError, match="mask must be bool"):
        grpo_advantages(REWARDS, GROUP, MASK.float())
    with pytest.raises(TypeError, match="valid must be bool"):
        grpo_advantages(REWARDS, GROUP, MASK, valid=VALID.long())
    with pytest.raises(TypeError, match="group_ids must be int64"):
        grpo_advantages(REWARDS, GROUP.int(), MASK)
    with pytest.raises(ValueError, match=r"rewards and group_ids.*\(4,\) and \(3,\)"):
        grpo_advantages(REWARDS, GROUP[:3], MASK)
    with pytest.raises(ValueError, match="finite.*nan in row 1"):
        grpo_advantages(torch.tensor([1.0, float("nan"), 0.0, 0.0]), GROUP, MASK)
