"""An offloaded engine holds no device memory and generates the same once it is back; the worker moves it as the device lease says."""

import asyncio
import threading

import pytest
import torch

from rl_core.rollouts.hf import HFEngine
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.residency import HFResidency
from rl_core.rollouts.hf.weight_target import HFWeightTarget
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.residency import ALL_PARTS, EngineResidency
from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from rl_core.weights.manifest import host_bytes

RAW = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


class Tokenizer:
    eos_token_id = 0


@pytest.fixture
def loop():
    weights = DecoderWeights(DecoderConfig.from_dict(RAW))
    generator = torch.Generator().manual_seed(0)
    shapes = weights.names_and_shapes()
    weights.load((n, torch.randn(s, generator=generator) * 0.3) for n, s in shapes.items())
    made = EngineLoop(HFEngine(weights, Tokenizer(), max_batch=8, max_seq_len=64))
    yield made
    made.close()


def generated(loop, *, meanwhile=lambda: None):
    """Return the ids of two rows; `meanwhile` runs once they are submitted."""
    done, results = threading.Event(), {}

    def sink(batch):
        results.update(batch)
        if len(results) == 2:
            done.set()

    params = SamplingParams.of({"max_new_tokens": 20, "ignore_eos": True})
    loop.submit([Row(key=k, prompt=(5, 6, 7 + k), params=params, seed=k) for k in range(2)], sink)
    meanwhile()
    assert done.wait(60)
    return [results[key].ids for key in range(2)]


def bytes_of(loop):
    weights = sum(one.untyped_storage().nbytes() for one in loop.engine.stored_weights())
    return weights, loop.engine._decoder._cache.data.untyped_storage().nbytes()


def test_asleep_an_engine_holds_no_memory_and_awake_it_generates_the_same(loop):
    residency, before = HFResidency(loop), generated(loop)
    for tensor in HFWeightTarget(loop).destinations().values():
        host_bytes(
            tensor
        )  # as a receiver that writes in place does: torch fixes the size of a storage of which numpy has a view
    assert all(bytes_of(loop))
    residency.offload(["kv_cache", "weights"])
    residency.offload(["kv_cache", "weights"])
    assert bytes_of(loop) == (0, 0)
    residency.onload(["weights"])
    assert bytes_of(loop)[0] > 0 and bytes_of(loop)[1] == 0, "the cache is still away"
    residency.onload(["weights", "kv_cache"])
    assert generated(loop) == before


def test_rows_that_are_left_as_an_engine_falls_asleep_go_on_when_it_wakes(loop):
    residency, expected = HFResidency(loop), generated(loop)

    def nap():
        residency.offload(["kv_cache", "weights"])
        assert bytes_of(loop) == (0, 0)
        residency.onload(["kv_cache", "weights"])

    assert generated(loop, meanwhile=nap) == expected


class Log:
    """A residency and a server that note what they are told."""

    def __init__(self):
        self.log = []

    def offload(self, parts):
        self.log.append(("offload", list(parts)))

    def onload(self, parts):
        self.log.append(("onload", list(parts)))

    async def pause(self, seconds):
        self.log.append(("pause", seconds))


async def test_what_is_in_flight_is_given_back_before_a_part_goes_and_a_newer_lease_wins():
    calls = Log()
    residency = EngineResidency(calls, calls)
    assert residency.complete
    await residency.move_to([], 3)
    assert not residency.complete
    assert calls.log == [("pause", 0.0), ("offload", ["kv_cache", "weights"]), ("onload", [])]
    calls.log.clear()
    await residency.move_to(["weights", "kv_cache"], 2)
    assert calls.log == [] and not residency.complete, "that lease is overtaken"
    await asyncio.gather(residency.move_to(["weights"], 4), residency.move_to(["weights", "kv_cache"], 5))
    assert residency.parts == ALL_PARTS and calls.log[-1] == ("onload", ["kv_cache", "weights"])
    residency.reset_token()
    await residency.move_to([], 1)
    assert residency.parts == frozenset(), "another runner counts from one"
