"""A backend of padded tensors under the row port: what it is asked, what becomes of its answer, and what it may leave out."""

import pytest
import torch

from rl_core.api.errors import RolloutDataFailure
from rl_core.rollouts.base import BatchedDataDict, GenerationInterface
from rl_core.rollouts.manager import RolloutManager
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from rl_core.rollouts.padded import PaddedGenerator, row_generator

PAD = 99


class Padded(GenerationInterface):
    """Continues every row with 65, 66 and pads one column more than needed."""

    def __init__(self, **changes):
        self.changes, self.seen = changes, []

    async def generate_async(self, data, greedy=False):
        self.seen.append({**data, "greedy": greedy})
        length = int(data["input_lengths"][0])
        ids = torch.cat([data["input_ids"][0, :length], torch.tensor([65, 66, PAD])])
        logprobs = torch.cat([torch.zeros(length), torch.tensor([-0.5, -0.25, 0.0])])
        row = {
            "output_ids": ids.unsqueeze(0),
            "unpadded_sequence_lengths": torch.tensor([length + 2]),
            "logprobs": logprobs.unsqueeze(0),
        }
        yield 0, BatchedDataDict({**row, **self.changes})


async def test_a_row_is_asked_as_a_batch_of_one_and_its_padding_removed():
    backend = Padded()
    output = await PaddedGenerator(backend).generate_row(
        [1, 2, 3], seed=7, stop_strings=["x"], max_new_tokens=5, greedy=True
    )
    (seen,) = backend.seen
    assert seen["input_ids"].tolist() == [[1, 2, 3]] and seen["input_ids"].dtype == torch.int64
    assert seen["input_lengths"].tolist() == [3] and seen["input_lengths"].dtype == torch.int32
    assert (seen["stop_strings"], seen["seeds"], seen["max_new_tokens"], seen["greedy"]) == ([["x"]], [7], [5], True)
    assert (output.ids, output.logprobs) == ([65, 66], [-0.5, -0.25])
    assert (output.finish_reason, output.versions, output.worker) == ("stop", [(0, 2, 0)], 0)


async def test_what_a_backend_says_of_a_row_is_taken():
    changes = {
        "truncated": torch.tensor([True]),
        "finish_reasons": ["seq_limit"],
        "policy_versions": [[(0, 1, 3), (1, 2, 4)]],
        "gen_leader_worker_idx": torch.tensor([2]),
    }
    output = await PaddedGenerator(Padded(**changes)).generate_row([1], seed=7)
    expected = ("seq_limit", [(0, 1, 3), (1, 2, 4)], 2)
    assert (output.finish_reason, output.versions, output.worker) == expected
    output = await PaddedGenerator(Padded(truncated=torch.tensor([True]))).generate_row([1], seed=7)
    assert output.finish_reason == "length"


async def test_a_backend_that_yields_nothing_fails_the_sample():
    class Silent(GenerationInterface):
        async def generate_async(self, data, greedy=False):
            return
            yield

    with pytest.raises(RolloutDataFailure, match="must yield one row, got none"):
        await PaddedGenerator(Silent()).generate_row([1], seed=7)


async def test_a_backend_without_versions_serves_the_initial_weights(fakes):
    class Plain:
        generate_async = Padded().generate_async

    impl = AsyncRolloutImpl(fakes.Tokenizer(), {"task": fakes.Env()}, 1, 100, Plain())
    record = await impl.run_rollout(fakes.sample())
    assert (record.start_version, record.end_version) == (0, 0)
    assert record.completions[0].message_log[1]["policy_versions"] == [(0, 2, 0)]


async def test_the_manager_takes_a_padded_backend_and_records_no_seed_it_does_not_honour(fakes):
    class Versioned(Padded):
        honours_seeds = False

        def __init__(self):
            super().__init__()
            self.policy_version = 4

    manager = RolloutManager(fakes.Tokenizer(), {"task": fakes.Env()}, 2, 100, 1, Versioned())
    record = await manager.run(fakes.sample())
    assert [completion.seed for completion in record.completions] == [None, None]
    assert record.start_version == 4 and record.completions[0].policy_versions == (4, 4)


def test_a_generator_of_rows_is_used_as_it_is(fakes):
    generation = fakes.Generation()
    assert row_generator(generation) is generation
