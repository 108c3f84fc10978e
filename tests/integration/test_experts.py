"""A mixture of experts from the trainer to the engines: what is trained is proven to be served, and scored by the trainer.

transformers has the experts of a layer in one parameter, SGLang in another one, and what travels has them one by one.
"""

import asyncio
import json

import pytest
import torch

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.api.errors import InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.messages.engine import TensorPlace
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.hf.worker import HFRolloutWorker
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import SGLangWorker, setup
from rl_core.rollouts.sglang.proof import GivenTensors
from tests.actor_samples import EXPERTS, make_model, make_record, make_spec
from tests.integration.rollout_world import World

PROMPTS = [[3, 4, 5], [7, 8], list(range(2, 40)), [9, 10, 11, 12]]
ENGINES = {"hf": (HFRolloutWorker, 1), "sglang": (SGLangWorker, 1), "sglang of two": (SGLangWorker, 2)}
"""Worker and number of tensor-parallel processes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 43, "intermediate_size": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return make_model(tmp_path_factory.mktemp("experts"), tied=False, family="qwen3_moe", **EXPERTS | sizes)


@pytest.fixture(scope="module")
def actor(folder):
    """A trainer after one step."""
    made = FSDPActor(RLJobSpec.model_validate(make_spec(folder, rollout__maxSequenceLength=64)))
    made.init_worker()
    made.load_batch([make_record(group) for group in range(4)])
    made.compute_advantages_and_returns()
    made.run_training(1)
    return made


@pytest.fixture(scope="module", params=ENGINES)
def world(request, folder, actor):
    """A rollout with each engine that serves the trainer's weights."""
    config = json.loads((folder / "config.json").read_text())
    (worker, processes), options = ENGINES[request.param], setup.options
    with pytest.MonkeyPatch.context() as patch:
        if processes > 1:
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
            patch.setenv(
                "SGLANG_NCCL_SO_PATH", "none"
            )  # else SGLang makes a communicator of GPUs where the library is there
            patch.setattr(setup, "options", lambda *arguments: options(*arguments) | {"tp_size": processes})
        made = World(worker, max_seq_len=64, config=config, engine=request.param.split()[0])
        made.start()
    report = made.publish_next(actor.manager.get_model_state_dict(True, True))
    assert report.acked == ("rollout:0",)
    yield made
    made.close()


def test_what_was_trained_is_proven_to_be_served_and_scored_alike(world, actor):
    assert world.engine.weights_proof == PROVEN
    generator = world.engine.generator(SamplingParams(max_new_tokens=20))

    async def rows():
        return await asyncio.gather(*[generator.generate_row(p, seed=i, greedy=False) for i, p in enumerate(PROMPTS)])

    for prompt, row in zip(PROMPTS, asyncio.run(rows())):
        wanted = actor.score([*prompt, *row.ids], len(prompt))
        assert torch.tensor(row.logprobs).tolist() == pytest.approx(wanted, abs=1e-4)


def test_an_expert_with_other_weights_is_found_by_name(world, actor):
    if world.spec.rollout.engine != "sglang":
        pytest.skip("the receiver writes into this engine's tensors itself")
    name, state = "model.layers.1.mlp.experts.3.up_proj.weight", actor.manager.get_model_state_dict(True, True)
    wrong, engine, target = state[name] + 0.1, world.engine.engine, world.engine.weight_target
    target._buffer.bytes[: wrong.nbytes].copy_(wrong.reshape(-1).view(torch.uint8))
    place = TensorPlace(name=name, shape=list(wrong.shape), dtype="float32", offset=0)
    engine.call("begin_weights").result(60)
    engine.call("load_weights", places=[place], version=world.version).result(60)
    held = engine.call("end_weights", turns=1, whole=True).result(60)
    given = GivenTensors()
    for tensor in state.items():
        given.add(*tensor)
    with pytest.raises(
        InfrastructureError, match=r"1 hold something else \['model\.layers\.1\.mlp\.experts\.3\.up_proj"
    ):
        given.prove(held["ranks"], whole=True)
