"""The OpenAI endpoint of a rollout beside the engine alone: tokens per second, overhead of a call, first token of a stream. Prints JSON.

`throughput`: 64 conversations of 4 short turns at a time, over HTTP from a process of their own, over the same rows (same ids, same seeds)
given to the engine directly. `overhead`: a call whose generation takes no time, one after another, median and 95th percentile.
`first_token`: from the request to the first chunk of such a call, streamed. `router`: both through the router of an env pod, which keeps the
records of the calls, on the endpoint's event loop. HF engine on the processor: hidden size 512, 8 layers.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
SESSIONS, TURNS, NEW_TOKENS = 64, 4, 32


def make_engine(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rl_core.rollouts.hf.engine import HFEngine

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return HFEngine(Qwen2ForCausalLM(config), tokenizer, max_batch=SESSIONS, max_seq_len=1024)


class AtOnce:
    """A `RowGenerator` that has its tokens at once."""

    policy_version, honours_seeds = 0, True

    async def generate_row(self, prompt: Any, *, on_tokens: Any = None, **_: Any) -> Any:
        from rl_core.rollouts.rows import GenerationOutput

        ids = [40] * 8
        if on_tokens is not None:
            on_tokens(ids[:1])
        return GenerationOutput(ids=ids, logprobs=[-1.0] * 8, finish_reason="length", versions=[(0, 8, 0)])


class Waiting:
    """Programs that never end: the calls of their sessions come from this benchmark."""

    async def step_rows(self, rows: Any) -> Any:
        [self.row] = rows
        return await asyncio.Event().wait()


async def routed(base_url: str, api_key: str) -> dict[str, Any]:
    """Return the overhead of calls and of first chunks by way of a router, milliseconds."""
    from rl_core.envs.sessions import SessionRouter
    from rl_core.messages.agents import REQUEST
    from rl_core.messages.envs import EnvRow

    programs = Waiting()
    router = SessionRouter(programs)
    await router.start()
    request = {"base_url": base_url, "api_key": api_key, "model": "policy", "seconds": 600.0, "attempt": 1}
    request |= {"resumed": False, "oldest_version": 0}
    row = EnvRow(key="overhead", messages=[], metadata={REQUEST: request}, task_name=None)
    run = asyncio.create_task(router.step_rows([row]))
    await asyncio.sleep(0.1)
    given = programs.row.metadata[REQUEST]
    url, keys = f"{given['base_url']}/chat/completions", [given["api_key"]]
    calls = (await called(url, keys, turns=1000))[50:]
    first = (await called(url, keys, turns=1000, stream=True))[50:]
    run.cancel()
    await router.close()
    return {"overhead_ms": percentiles(calls), "first_token_ms": percentiles(first)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {"p50": 1e3 * statistics.median(seconds), "p95": 1e3 * statistics.quantiles(seconds, n=20)[-1]}


async def converse(url: str, keys: list[str], turns: int, stream: bool) -> list[float]:
    """Hold one conversation per key at the same time; return the seconds of each call, or to its first chunk."""
    from aiohttp import ClientSession, TCPConnector

    times: list[float] = []

    async def one(http: ClientSession, key: str) -> None:
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(turns):
            began = time.perf_counter()
            body = {"messages": messages, "max_tokens": NEW_TOKENS, "stream": stream}
            async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}.run"}) as answer:
                assert answer.status == 200, await answer.text()
                if stream:
                    await answer.content.readline()
                    times.append(time.perf_counter() - began)
                    await answer.read()
                    continue
                reply = (await answer.json())["choices"][0]["message"]
            times.append(time.perf_counter() - began)
            if turns == TURNS:
                messages += [reply, {"role": "user", "content": "go on"}]

    async with ClientSession(connector=TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http, key) for key in keys))
    return times


async def called(url: str, keys: list[str], *, turns: int, stream: bool = False) -> list[float]:
    """Run `converse` in another process."""
    job = json.dumps({"url": url, "keys": keys, "turns": turns, "stream": stream})
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", job, stdout=subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    times: list[float] = json.loads(out)
    return times


async def measure(repetitions: int) -> dict[str, Any]:
    from rl_core.rollouts.endpoint.server import Endpoint
    from rl_core.rollouts.generation import EngineGenerator
    from rl_core.rollouts.hf.loop import EngineLoop
    from rl_core.rollouts.sampling import SamplingParams
    from tests.unit.endpoint.conftest import TEMPLATES, make_episodes, make_tokenizer

    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    episodes = make_episodes(tokenizer, max_seq_len=1024, max_calls=4096)
    endpoint = Endpoint(episodes, tokenizer, model="policy", max_new_tokens=NEW_TOKENS)
    await endpoint.start("127.0.0.1")
    url = f"http://127.0.0.1:{endpoint.port}/v1/chat/completions"
    loop = EngineLoop(make_engine(tokenizer))
    generator = EngineGenerator(loop, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    through, alone = [], []
    for _ in range(repetitions + 1):
        opened = [episodes.open(str(n), generator, seed=n, greedy=False) for n in range(SESSIONS)]
        await called(url, [episode.key for episode in opened], turns=TURNS)
        lines = [episode.session.lines()[-1] for episode in opened]
        began = min(line[0].times[0] for line in lines)
        through.append(SESSIONS * TURNS * NEW_TOKENS / (max(line[-1].times[1] for line in lines) - began))

        async def again(line: Any, seed: int) -> None:
            for turn in line:
                output = await generator.generate_row(
                    turn.ids[: -len(turn.output.ids)], seed=seed, max_new_tokens=NEW_TOKENS
                )
                assert output.ids == turn.output.ids

        start = time.perf_counter()
        await asyncio.gather(*(again(line, seed) for seed, line in enumerate(lines)))
        alone.append(SESSIONS * TURNS * NEW_TOKENS / (time.perf_counter() - start))
    loop.close()
    single = [episodes.open("overhead", AtOnce(), seed=0, greedy=False).key]  # type: ignore[arg-type]
    calls = (await called(url, single, turns=1000))[50:]
    first = (await called(url, single, turns=1000, stream=True))[50:]
    through_router = await routed(url.removesuffix("/chat/completions"), single[0])
    await endpoint.close()
    own, served = statistics.median(alone[1:]), statistics.median(through[1:])
    return {
        "throughput": {"engine_tokens_per_second": own, "endpoint_tokens_per_second": served, "ratio": served / own},
        "overhead_ms": percentiles(calls),
        "first_token_ms": percentiles(first),
        "router": through_router,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(asyncio.run(converse(**json.loads(given.client)))))
    else:
        print(json.dumps(asyncio.run(measure(given.repetitions)), indent=1))


if __name__ == "__main__":
    main()
