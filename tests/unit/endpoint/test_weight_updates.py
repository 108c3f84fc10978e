"""The weights of a real engine change while calls run: a call spans versions or waits, and each of its tokens has the version that sampled it."""

import asyncio
import itertools
import threading

import openai
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_core.rollouts.endpoint.server import Endpoint
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.weight_target import HFWeightTarget
from rl_core.rollouts.sampling import SamplingParams
from tests.unit.endpoint.conftest import make_episodes
from tests.unit.endpoint.test_endpoint import HELLO

TOKENS, STEPS_BEFORE = 40, 6
"""Tokens of a call, and steps of the engine before the update."""


@pytest.fixture
def models(chatml):
    """Two models of one shape."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = {"vocab_size": len(chatml), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen2Config(**sizes, **vocabulary, num_key_value_heads=2, max_position_embeddings=256)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(Qwen2ForCausalLM(config).eval())
    return found


@pytest.mark.parametrize("keep_cache", [False, True], ids=["abort_resume", "keep_kv"])
async def test_a_call_in_progress_spans_versions_and_one_that_comes_during_the_update_waits(chatml, models, keep_cache):
    steps, goes_on = itertools.count(1), threading.Event()

    def after_step(tokens):
        if next(steps) == STEPS_BEFORE:
            goes_on.wait(60)

    loop = EngineLoop(HFEngine(models[0], chatml, max_batch=4, max_seq_len=256), on_tokens=after_step)
    loop.engine.serve(0)
    episodes = make_episodes(chatml)
    endpoint = Endpoint(episodes, chatml, model="policy", max_new_tokens=TOKENS)
    await endpoint.start("127.0.0.1")
    generator = EngineGenerator(loop, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    episode = episodes.open("0-1_g0", generator, seed=5, greedy=False)
    url = f"http://127.0.0.1:{endpoint.port}/v1"
    target = HFWeightTarget(loop)
    async with openai.AsyncOpenAI(base_url=url, api_key=f"{episode.key}.run", max_retries=0) as client:
        create = client.chat.completions.create
        stream = await create(model="policy", messages=HELLO, stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        pausing = asyncio.create_task(asyncio.to_thread(loop.pause, keep_cache=keep_cache))
        while not loop._paused:
            await asyncio.sleep(0)
        goes_on.set()
        await pausing
        await target.prepare(60)
        waiting = asyncio.create_task(create(model="policy", messages=[*HELLO, *HELLO]))
        while len(episode._calls) < 2:
            await asyncio.sleep(0)
        target.load(iter(models[1].state_dict().items()), 1)
        assert not waiting.done()
        await target.resume(1, "")
        async for _ in chunks:
            pass
        await waiting
    await endpoint.close()
    loop.close()
    first, second = sorted((turn.output for turn in episode.session.turns), key=lambda output: -len(output.versions))
    assert second.versions == [(0, TOKENS, 1)]
    (_, cut, _), _ = first.versions
    assert 0 < cut < TOKENS and first.versions == [(0, cut, 0), (cut, TOKENS, 1)]
    # Each token has the log-probability of the weights that sampled it. With keep_kv, later tokens see keys and values of version 0.
    prompts = {tuple(turn.output.ids): turn.prompt for turn in episode.session.turns}
    for output in (first, second):
        told = torch.tensor(output.logprobs)
        for begin, end, version in output.versions:
            if version == 0 or output is second or not keep_cache:
                expected = logprobs(models[version], prompts[tuple(output.ids)], output.ids)
                torch.testing.assert_close(told[begin:end], expected[begin:end], rtol=0, atol=1e-4)


def logprobs(model, prompt, ids):
    """Return those of `ids` [tokens] behind `prompt`."""
    sequence = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        scores = model(sequence).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return scores[at, torch.tensor(ids)]
