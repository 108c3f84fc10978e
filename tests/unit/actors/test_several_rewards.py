"""Rewards by name reach the estimator that compares each by itself."""

from dataclasses import replace

import pytest
import torch

from rl_core.algorithms.advantages import gdpo_advantages
from rl_core.api.errors import ConfigError, DataError

NAMES = ("right", "short")


def with_rewards(records, names=NAMES):
    """Return the records with a reward for each name; the first is the one they have."""
    generator = torch.Generator().manual_seed(2)

    def scored(completion):
        values = [completion.reward, *torch.randint(0, 3, (len(names) - 1,), generator=generator).tolist()]
        return replace(completion, metrics={f"reward/{name}": float(v) for name, v in zip(names, values, strict=True)})

    return [replace(record, completions=[scored(one) for one in record.completions]) for record in records]


def prepare(actor, records):
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    return actor.engine.prepared


def test_each_reward_is_compared_within_its_group_by_itself(make_actor, records):
    prepared = prepare(make_actor(algorithm__name="gdpo"), with_rewards(records))
    batch = prepared.batch
    rows = torch.zeros(len(batch.valid), dtype=torch.float64)
    for name in NAMES:
        values = batch.reward_components[name].double()
        for group in batch.group_ids.unique():
            inside = (batch.group_ids == group) & batch.valid
            if values[inside].max() > values[inside].min():
                rows[inside] += (values[inside] - values[inside].mean()) / (values[inside].std() + 1e-6)
    trusted = rows[batch.valid]
    expected = torch.where(batch.valid, (rows - trusted.mean()) / trusted.std(correction=0), 0.0)[:, None]
    torch.testing.assert_close(
        prepared.advantages.double(), expected * batch.loss_mask, atol=1e-5, rtol=1e-5, check_dtype=False
    )


def test_one_reward_and_a_sample_that_lacks_one_are_refused_by_name(make_actor, records):
    with pytest.raises(ConfigError, match=r"at least two rewards by name, got \['right'\]; use grpo"):
        prepare(make_actor(algorithm__name="gdpo"), with_rewards(records, NAMES[:1]))
    lacking = with_rewards(records)
    lacking[1] = with_rewards(records[1:2], NAMES[:1])[0]
    with pytest.raises(DataError, match=r"sample 0-1_g0 must have the reward 'short'"):
        prepare(make_actor(algorithm__name="gdpo"), lacking)
    prepare(make_actor(), lacking)  # others take the sum


def test_a_rank_without_groups_takes_part_in_the_whitening():
    seen = []

    def reduce(tensor):
        seen.append(tensor)
        return tensor

    empty = torch.zeros(0, 4, dtype=torch.bool)
    result = gdpo_advantages({}, torch.zeros(0, dtype=torch.int64), empty, reduce=reduce)
    assert result.advantages.shape == (0, 4) and len(seen) == 2
