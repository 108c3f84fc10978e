"""The real SGLang engine in bfloat16: with `model.float32Head` logits are never rounded to bfloat16, and wrong weights are not served.

The weights of bfloat16 that are wrong differ by a step of 1e-6, which moves a few elements of a thousand.
"""

import asyncio

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import SGLangWorker
from tests.actor_samples import make_spec
from tests.integration.conftest import ARGUMENTS
from tests.integration.fsdp_rank import Rank
from tests.integration.rollout_world import CONFIG, World, random_state
from tests.integration.wrong_weights import WAYS, assert_a_tensor_that_is_not_loaded_is_named, assert_not_served

PROMPTS = [[3, 4, 5], [7, 8], list(range(2, 40)), [9, 10, 11, 12]]
HEAD = {"dtype": "bfloat16", "float32Head": True}


@pytest.fixture(scope="module")
def world():
    spec = {"model": {"path": "unused", **HEAD}}
    made = World(SGLangWorker, max_seq_len=64, spec=spec, engine="sglang", engineArgs=ARGUMENTS)
    made.start()
    yield made
    made.close()


def published(world, seed, *, without_layers=False):
    """Publish random weights in bfloat16; return them. `without_layers`: those whose layers add nothing to the embeddings."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in random_state(seed).items()}
    for name, tensor in state.items():
        if without_layers and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    world.publish_next(state)
    return state


def generated(world):
    """Return (prompt, ids, log-probabilities) of samples for PROMPTS."""
    generator = world.engine.generator(SamplingParams(max_new_tokens=20, ignore_eos=True))

    async def rows():
        return await asyncio.gather(*[generator.generate_row(p, seed=i) for i, p in enumerate(PROMPTS)])

    outputs = asyncio.run(rows())
    return [(p, one.ids, torch.tensor(one.logprobs)) for p, one in zip(PROMPTS, outputs, strict=True)]


def trainer(state, folder):
    """Return a trainer of the weights `state`, with the same settings."""
    logging.disable_progress_bar()
    sizes = {name: value for name, value in CONFIG.items() if name not in ("model_type", "architectures")}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).to(torch.bfloat16)
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    changes = {f"model__{name}": value for name, value in HEAD.items()}
    return Rank(make_spec(folder, rollout__maxSequenceLength=64, **changes), [[]], 0, 1).actor


def test_logits_are_computed_in_float32_by_engine_and_trainer(world, tmp_path):
    """Without layers the hidden states are known, so that nothing but the head can make a difference."""
    state = published(world, 1, without_layers=True)
    actor, table = trainer(state, tmp_path), state["model.embed_tokens.weight"]
    of_rounding = 0.0
    for prompt, ids, found in generated(world):
        inputs = table[[*prompt, *ids][len(prompt) - 1 : -1]].float()
        hidden = (inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
        logits = hidden.double() @ table.double().T
        exact, rounded = (
            one.log_softmax(-1)[torch.arange(len(ids)), ids] for one in (logits, logits.bfloat16().double())
        )
        assert (found - exact).abs().max() < 1e-5
        assert (torch.tensor(actor.score([*prompt, *ids], len(prompt))) - exact).abs().max() < 1e-5
        of_rounding = max(of_rounding, float((rounded - exact).abs().max()))
    assert of_rounding > 1e-3


def test_log_probabilities_of_a_whole_model_are_the_trainers_within_the_rounding_of_bfloat16(world, tmp_path):
    actor = trainer(published(world, 2), tmp_path)
    differences = torch.cat(
        [(found - torch.tensor(actor.score([*p, *ids], len(p)))).abs() for p, ids, found in generated(world)]
    )
    assert differences.mean() < 0.02 and differences.max() < 0.1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_wrong_when_it_reaches_the_engine_is_not_served(world, way):
    assert_not_served(world, way)


def test_a_tensor_that_does_not_reach_the_engine_is_seen_by_its_own_checksums(world):
    assert_a_tensor_that_is_not_loaded_is_named(world)
