"""Loss mask, flattening, seeds and the batch container."""

import pytest
import torch

from rl_core.api.errors import DataError
from rl_core.rollouts.base import BatchedDataDict, GenerationInterface, sample_seed, token_loss_mask


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_only_sampled_tokens_of_the_assistant_train():
    log = [
        {"role": "system", "content": "", "token_ids": ids(1)},
        {"role": "assistant", "content": "", "token_ids": ids(2, 3)},
        {"role": "user", "content": "", "token_ids": ids(4), "generation_logprobs": torch.zeros(1)},
        {"role": "assistant", "content": "", "token_ids": ids(5, 6), "generation_logprobs": torch.zeros(2)},
        {
            "role": "assistant",
            "content": "",
            "token_ids": ids(7, 8),
            "generation_logprobs": torch.zeros(2),
            "token_loss_mask": torch.tensor([1, 0]),
        },
    ]
    assert token_loss_mask(log).tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert token_loss_mask([]).tolist() == []


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("key", ["generation_logprobs", "token_loss_mask"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_message_whose_columns_do_not_cover_its_tokens_is_refused_where_it_stands(key, length, as_list):
    columns = {"generation_logprobs": torch.zeros(2), "token_loss_mask": torch.ones(2, dtype=torch.int64)}
    columns[key] = [0.0] * length if as_list else torch.zeros(length)
    log = [
        {"role": "user", "content": "", "token_ids": ids(4)},
        {"role": "assistant", "content": "", "token_ids": ids(5, 6), **columns},
    ]
    with pytest.raises(DataError, match=rf"^message 1: {key} must have one entry per token, 2, got shape \[{length}\]"):
        token_loss_mask(log)


def test_seeds_are_63_bit_repeatable_and_all_different():
    seeds = {sample_seed(s, g, i, a) for s in (0, 1) for g in ("0-1", "0-11") for i in range(8) for a in (1, 2)}
    assert len(seeds) == 64 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "0-1", 3) == sample_seed(0, "0-1", 3, 1)
    assert sample_seed(1, "1-1", 1) != sample_seed(11, "-1", 1)


def test_a_batch_knows_its_rows_and_slices_all_columns():
    batch = BatchedDataDict({"a": torch.arange(4), "b": ["w", "x", "y", "z"]})
    assert batch.size == 4 and BatchedDataDict().size == 0
    assert batch.slice(1, 3)["a"].tolist() == [1, 2] and batch.slice(1, 3)["b"] == ["x", "y"]


async def test_a_backend_with_the_sync_call_only_can_be_used_asynchronously():
    class Doubling(GenerationInterface):
        def generate(self, data, greedy=False):
            return BatchedDataDict({"output_ids": data["input_ids"] * 2})

    rows = [row async for row in Doubling().generate_async({"input_ids": torch.tensor([[1], [2]])})]
    assert [(index, row["output_ids"].tolist()) for index, row in rows] == [(0, [[2]]), (1, [[4]])]


def test_a_backend_may_set_its_version_as_an_attribute():
    class Versioned(GenerationInterface):
        def __init__(self):
            self.policy_version = 4

    assert Versioned().policy_version == 4 and GenerationInterface().policy_version == 0
