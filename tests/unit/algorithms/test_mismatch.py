"""The distance between engine and trainer on the same tokens: its numbers by definition, and by parts of the tokens."""

import pytest
import torch

from rl_core.algorithms.mismatch import LENGTHS, mismatch_stats
from rl_core.algorithms.stats import finish_stats, merge_stats


def rows(lengths, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    train, rollout = (torch.randn(shape, generator=generator) * 0.1 for _ in range(2))
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return train, rollout, mask


def kl(train, rollout, where):
    d = (train - rollout)[where].double()
    return float((d.exp() - 1 - d).mean())


def test_rows_are_told_apart_by_their_trained_tokens_and_empty_parts_have_no_number():
    train, rollout, mask = rows([255, 256, 300, 1024], 1100)
    found = mismatch_stats(train, rollout, mask, bounds=(0.8, 1.2))
    parts = {low: found[f"rollout/mismatch_kl/length_{low}"] for low in LENGTHS}
    assert [float(parts[low].count) for low in LENGTHS] == [255, 556, 1024, 0, 0]
    middle = mask & torch.tensor([False, True, True, False])[:, None]
    assert float(parts[256]) == pytest.approx(kl(train, rollout, middle), rel=1e-9)
    whole = sum(float(parts[low]) * float(parts[low].count) for low in LENGTHS) / float(mask.sum())
    assert float(found["mismatch/kl"]) == pytest.approx(whole, rel=1e-9)


def test_lengths_count_the_tokens_of_the_trainers_version_and_rows_by_all_that_train():
    train, rollout, mask = rows([300, 300], 300)
    ages = torch.zeros(2, 300)
    ages[0, :290] = 1
    found = mismatch_stats(train, rollout, mask, bounds=(0.8, 1.2), ages=ages, max_age=2)
    assert float(found["rollout/mismatch_kl/length_256"].count) == 310, (
        "the first row is long, though few of its tokens are young"
    )
    old = mask & (ages == 1)
    assert float(found["rollout/mismatch_kl/age_1"]) == pytest.approx(kl(train, rollout, old), rel=1e-9)
    assert not float(found["rollout/mismatch_kl/age_2"].count)


def test_micro_batches_and_ranks_merge_to_what_one_batch_gives():
    train, rollout, mask = rows([10, 260, 700, 1030, 5000], 5000)
    whole = finish_stats(mismatch_stats(train, rollout, mask, bounds=(0.8, 1.2)))
    parts = [mismatch_stats(train[at], rollout[at], mask[at], bounds=(0.8, 1.2)) for at in ([0, 3], [1, 4], [2])]
    assert finish_stats(merge_stats(parts)) == pytest.approx(whole, rel=1e-9)
