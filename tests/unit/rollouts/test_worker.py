"""The worker's base over a fake engine: what it asks of the port, and when it serves. No model, no hub, a real publisher."""

import asyncio
import importlib
import json

import pytest
import torch

from rl_core.api.backends import ENGINES
from rl_core.api.errors import GenerationUnavailable, InfrastructureError
from rl_core.messages.groups import ProbeAnswer
from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.groups import PROBE_SEED
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.pausing_target import pausing
from rl_core.rollouts.rows import GenerationOutput
from rl_core.rollouts.sampling import SamplingParams
from rl_core.weights.publisher import WeightPublisher
from rl_core.weights.target import InPlaceTarget
from tests.weight_samples import StateSource


class CountingGeneration:
    """A `RowGenerator` that continues with 7, 8, 9, ... and keeps its requests."""

    policy_version, honours_seeds = 5, True

    def __init__(self):
        self.seen = []

    async def generate_row(self, prompt, **request):
        self.seen.append(request)
        count = request["max_new_tokens"]
        ids = list(range(7, 7 + count))
        return GenerationOutput(ids=ids, logprobs=[-0.5] * count, finish_reason="length", versions=[(0, count, 5)])


class DictTarget:
    """Holds weights as a dict."""

    def __init__(self, log):
        self.log, self.held = log, {}

    async def prepare(self, deadline):
        self.log.append("prepare")

    def names_and_shapes(self):
        return {"w": ((2,), "float32")}

    def load(self, tensors, version):
        self.held = {name: tensor.clone() for name, tensor in tensors}

    async def resume(self, version, digest):
        self.log.append(f"resume {version}")


class Nap:
    """Residency that notes what it is told."""

    def __init__(self, log):
        self.log = log

    def offload(self, parts):
        self.log.append(f"offload {' '.join(parts)}")

    def onload(self, parts):
        self.log.append(f"onload {' '.join(parts)}")


class FakeEngine:
    row_capacity, max_seq_len, policy_version = 12, 32, 5
    weights_proof = PROVEN

    def __init__(self):
        self.log, self.params = [], []
        self.weight_target, self.residency = DictTarget(self.log), Nap(self.log)
        self.backend = CountingGeneration()

    def generator(self, params):
        self.params.append(params)
        return self.backend

    async def pause(self, *, keep_cache):
        self.log.append(f"pause, keep_cache={keep_cache}")

    def watch(self, lost, back):
        self.lost, self.back = lost, back

    def load(self):
        return EngineLoad(running=0, waiting=0)

    def close(self):
        self.log.append("close")


def tokenizer_files():
    from tokenizers import Tokenizer, models

    return {
        "config.json": json.dumps({"max_position_embeddings": 24}).encode(),
        "tokenizer.json": Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")).to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}).encode(),
    }


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def asked():
    return []


@pytest.fixture
def waits():
    """The waits that the worker declares while its engine is built."""
    return []


@pytest.fixture
async def worker(engine, asked, waits):
    spec = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"sampling": {"temperature": 0.7, "stop": ["x"], "maxNewTokens": 9}},
    }

    class Worker(RolloutWorkerBase):
        def build_engine(*args):
            asked.append(args)
            args[-1]("the process imports its libraries")
            waits.append(made._context.heartbeat().wait)
            return engine

    made = Worker(spec)
    made._context.files = tokenizer_files()
    yield made
    await made.close()


async def test_the_engine_is_built_once_for_the_longest_sequence_of_the_model(worker, asked, waits):
    worker.init_worker()
    worker.init_worker()
    ((spec, files, device, max_seq_len, on_step, _),) = asked
    assert (spec, device, max_seq_len) == (worker.spec, "cpu", 24) and files is worker.files
    on_step(3)
    assert worker._context.heartbeat().progress["tokens"] == 3
    (wait,) = waits
    assert (wait.what, wait.on) == ("the process imports its libraries", f"{worker.identity.name}/engine")
    assert worker._context.heartbeat().wait is None


async def test_training_takes_the_jobs_sampling_settings(worker, engine):
    worker.init_worker()
    assert engine.params == [SamplingParams(max_new_tokens=9, temperature=0.7, stop_strings=("x",))]


async def test_nothing_is_served_before_the_engine_is_built_and_its_weights_are_proven(worker, engine):
    assert worker.status()["version"] == -1
    with pytest.raises(InfrastructureError, match="call init_worker first"):
        await worker.probe([3], 2)
    worker.init_worker()
    with pytest.raises(GenerationUnavailable, match="no proven weights are served"):
        await worker.probe([3], 2)
    publisher = WeightPublisher(worker.spec, 0)
    try:
        await asyncio.to_thread(publisher.publish, 5, StateSource({"w": torch.tensor([1.0, 2.0])}), [], 0)
        assert (await worker.join(publisher.address)).version == 5
    finally:
        await asyncio.to_thread(publisher.close)
    assert engine.log == ["prepare", "resume 5"] and engine.weight_target.held["w"].tolist() == [1.0, 2.0]
    assert await worker.probe([3, 4], 2) == ProbeAnswer(ids=(7, 8), logprobs=(-0.5, -0.5), version=5)
    (seen,) = engine.backend.seen
    assert seen == {"seed": PROBE_SEED, "max_new_tokens": 2}
    await worker.on_new_epoch(1)
    with pytest.raises(GenerationUnavailable):
        await worker.probe([3], 2)


async def test_a_worker_serves_only_with_its_whole_engine_on_the_device_and_takes_weights_without_its_cache(
    worker, engine
):
    await worker.occupy([], 1)  # nothing is built yet
    worker.init_worker()
    publisher = WeightPublisher(worker.spec, 0)
    try:
        await worker.occupy(["weights"], 2)
        await asyncio.to_thread(publisher.publish, 5, StateSource({"w": torch.tensor([1.0, 2.0])}), [], 0)
        await worker.join(publisher.address)
    finally:
        await asyncio.to_thread(publisher.close)
    assert engine.log == ["offload kv_cache", "onload weights", "prepare", "resume 5"]
    assert worker.status()["version"] == 5, "what it has is proven"
    with pytest.raises(GenerationUnavailable, match="given up its device"):
        await worker.probe([3], 2)
    await worker.occupy(["weights", "kv_cache"], 3)
    assert (await worker.probe([3, 4], 2)).ids == (7, 8)


async def test_closing_ends_the_engine(worker, engine):
    worker.init_worker()
    await worker.close()
    assert engine.log == ["close"]


async def test_an_engine_is_prepared_only_when_the_worker_is_empty_and_what_may_be_written_in_place_stays_so():
    log = []

    async def pause(deadline):
        log.append(f"pause {deadline}")

    class InPlace(DictTarget):
        def destinations(self):
            return {"w": "here"}

    plain, in_place = pausing(DictTarget(log), pause), pausing(InPlace(log), pause)
    await plain.prepare(8.0)
    assert log == ["pause 8.0", "prepare"]
    assert not isinstance(plain, InPlaceTarget)
    assert isinstance(in_place, InPlaceTarget) and in_place.destinations() == {"w": "here"}


@pytest.mark.parametrize("name", ENGINES)
def test_the_worker_class_of_every_engine_builds_one(name):
    module, _, attribute = ENGINES[name].partition(":")
    worker_class = getattr(importlib.import_module(module), attribute)
    assert issubclass(worker_class, RolloutWorkerBase) and callable(worker_class.build_engine)
