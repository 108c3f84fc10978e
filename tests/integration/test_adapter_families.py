"""Adapters of other families than those of test_adapter_sync.py: an engine computes with them what the trainer does."""

import asyncio
import json
from itertools import pairwise

import pytest
import torch

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import ReceiverAddress
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.hf.worker import HFRolloutWorker
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import SGLangWorker
from rl_core.transports import tokens
from tests.actor_samples import make_model, make_record, make_spec
from tests.integration.conftest import ARGUMENTS
from tests.integration.rollout_world import World

LORA = {"rank": 4, "alpha": 8.0}
PROMPTS = [[3, 4, 5], [7, 8], list(range(2, 40))]
WORKERS = {"hf": (HFRolloutWorker, {}), "sglang": (SGLangWorker, {"engine": "sglang", "engineArgs": ARGUMENTS})}
CASES = [("mistral", "hf"), ("mistral", "sglang"), ("olmo2", "hf"), ("gemma", "hf")]


def make_actor(folder):
    """Return a trainer of adapters whose large learning rate shows in the log-probabilities after a step."""
    changes = {"model__lora": LORA, "rollout__maxSequenceLength": 64, "actor__optimizer": {"learningRate": 0.1}}
    made = FSDPActor(RLJobSpec.model_validate(make_spec(folder, **changes)))
    made.init_worker()
    return made


def train(actor, step):
    actor.load_batch([make_record(group) for group in range(4)])
    actor.compute_advantages_and_returns()
    actor.run_training(step)


def publish(world, actor):
    """Publish the trainer's adapters, and the base where the publisher has none yet."""
    world.version += 1
    source = actor.manager.publish_source(1 << 20, needs_base=world.publisher.needs_base)
    receiver = ReceiverAddress(name="rollout:0", address=world.server.address, host_token=tokens.host_token())
    report = world.publisher.publish(world.version, source, [receiver], 1)
    source.finish()
    world.ledger.serve(world.version)
    return report


async def generated(world):
    generator = world.engine.generator(SamplingParams(max_new_tokens=16))
    return await asyncio.gather(*[generator.generate_row(p, seed=i, greedy=False) for i, p in enumerate(PROMPTS)])


@pytest.mark.parametrize(("family", "engine"), CASES)
def test_the_engine_scores_its_tokens_like_the_trainer_after_each_step(tmp_path, family, engine):
    sizes = {"vocab_size": 43, "intermediate_size": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    folder = make_model(tmp_path, tied=False, family=family, **sizes)
    actor, (worker, options) = make_actor(folder), WORKERS[engine]
    spec = {"model": {"path": "unused", "lora": LORA}}
    world = World(worker, 64, spec, config=json.loads((folder / "config.json").read_text()), **options)
    try:
        world.start()
        scores = []
        for step in range(3):
            if step:
                train(actor, step)
            report = publish(world, actor)
            assert report.acked == ("rollout:0",) and bool(report.patched) == bool(step), (
                "adapters alone after the base"
            )
            assert world.engine.weights_proof == PROVEN
            for prompt, row in zip(PROMPTS, asyncio.run(generated(world)), strict=True):
                wanted = actor.score([*prompt, *row.ids], len(prompt))
                assert torch.tensor(row.logprobs).tolist() == pytest.approx(wanted, abs=1e-4)
            scores.append(actor.score(PROMPTS[-1], 1))
        assert all(max(abs(a - b) for a, b in zip(*pair, strict=True)) > 1e-2 for pair in pairwise(scores))
    finally:
        world.close()
