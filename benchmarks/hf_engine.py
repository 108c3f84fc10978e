"""Tokens per second of the HF engine, beside transformers' `generate` and the time of the matrix products alone. Prints JSON.

Same weights, prompts, limits and thread for both; greedy tokens must be identical, token for token. `sampled` draws at
temperature 1. `ragged` rows have limits of their own (lognormal): the engine fills freed rows, `generate` runs batches
of the same size in order until each batch's longest row ends. `through_manager` is the whole way of a prompt group in a
rollout process: RolloutManager, one task per sample, an environment that answers at once. Limits: `matmul_tokens_per_second`
is a loop of nothing but this model's matrix products (prefill, and attention with the window growing as in the run);
`bandwidth_tokens_per_second` reads every weight and every live key and value once per step at the measured speed of memcpy.
Runs are interleaved, one thread, medians over the
repetitions; seconds are processor seconds of this process, so that a shared machine does not change them much.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

REPETITIONS = 5
SETUPS = {
    # name: hidden, intermediate, layers, vocabulary, prompts, samples per prompt, prompt tokens, new tokens
    "groups_32x8_short": (128, 512, 4, 24, 32, 8, 8, 16),
    "prompts_64_medium": (128, 256, 4, 512, 64, 1, 32, 64),
    "hidden_512_8_rows": (512, 1408, 8, 8192, 8, 1, 32, 24),
}
RAGGED = (128, 256, 4, 512, 96, 1, 24, 96)
RAGGED_BATCH = 32
HEADS, KV_HEADS = 4, 2


class Tokenizer:
    eos_token_id = None
    pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def make_model(hidden: int, intermediate: int, layers: int, vocabulary: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(vocabulary: int, prompts: int, samples: int, tokens: int) -> list[list[int]]:
    distinct = torch.randint(3, vocabulary, (prompts, tokens), generator=torch.Generator().manual_seed(1)).tolist()
    return [prompt for prompt in distinct for _ in range(samples)]


def generate(model: Any, prompts: list[list[int]], new: int, *, sample: bool) -> list[list[int]]:
    ids = torch.tensor(prompts)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, eos_token_id=-1, pad_token_id=0, **settings
    )
    return out[:, ids.shape[1] :].tolist()


def interleaved(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each call."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            seconds[name].append(_timed(call))
    return {name: statistics.median(values) for name, values in seconds.items()}


class Products:
    """The matrix products of a decode loop and nothing else."""

    def __init__(self, setup: tuple[int, ...]) -> None:
        hidden, intermediate, self.layers, vocabulary, prompts, samples, self.prompt, self.new = setup
        rows, dim = prompts * samples, hidden // HEADS
        self.hidden, self.wide, self.attended = (
            torch.randn(rows, hidden),
            torch.randn(rows, intermediate),
            torch.randn(rows, hidden),
        )
        self.qkv = torch.randn((HEADS + 2 * KV_HEADS) * dim, hidden)
        self.out, self.head = torch.randn(hidden, hidden), torch.randn(vocabulary, hidden)
        self.gate_up, self.down = torch.randn(2 * intermediate, hidden), torch.randn(hidden, intermediate)
        self.query = torch.randn(rows * KV_HEADS, HEADS // KV_HEADS, dim)
        self.keys = torch.randn(rows * KV_HEADS, self.prompt + self.new, dim)
        self.scores = torch.randn(rows * KV_HEADS, HEADS // KV_HEADS, self.prompt + self.new)
        tokens = prompts * self.prompt
        self.prefill = [torch.randn(tokens, size) for size in (hidden, hidden, hidden, intermediate)]

    def __call__(self) -> None:
        from rl_core.cpu.products import linear

        weights = (self.qkv, self.out, self.gate_up, self.down)
        with torch.inference_mode():
            for _ in range(self.layers):
                for rows, weight in zip(self.prefill, weights, strict=True):
                    linear(rows, weight)
            for step in range(self.new - 1):
                window = self.prompt + step + 1
                for _ in range(self.layers):
                    linear(self.hidden, self.qkv)
                    torch.bmm(self.query, self.keys[:, :window].transpose(1, 2))
                    torch.bmm(self.scores[:, :, :window], self.keys[:, :window])
                    linear(self.attended, self.out)
                    linear(self.hidden, self.gate_up)
                    linear(self.wide, self.down)
                linear(self.hidden, self.head)


def memcpy_bytes_per_second() -> float:
    source, target = np.ones(64 * 2**20, np.uint8), np.empty(64 * 2**20, np.uint8)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best


def _timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def bandwidth_seconds(setup: tuple[int, ...], bytes_per_second: float) -> float:
    hidden, intermediate, layers, vocabulary, prompts, samples, prompt, new = setup
    dim = hidden // HEADS
    weights = (
        layers * ((HEADS + 2 * KV_HEADS) * dim * hidden + hidden * hidden + 3 * intermediate * hidden)
        + vocabulary * hidden
    )
    keys = layers * 2 * KV_HEADS * dim * prompts * samples
    return sum(4 * (weights + keys * (prompt + step + 1)) for step in range(new)) / bytes_per_second


def fixed_lengths(setup: tuple[int, ...], bytes_per_second: float) -> dict[str, Any]:
    from rl_core.rollouts.hf import HFEngine

    hidden, intermediate, layers, vocabulary, prompts, samples, tokens, new = setup
    model = make_model(hidden, intermediate, layers, vocabulary)
    rows = make_prompts(vocabulary, prompts, samples, tokens)
    engine = HFEngine(model, Tokenizer(), max_batch=len(rows), max_seq_len=tokens + new)
    greedy, sampled = {"max_new_tokens": new, "temperature": 0.0}, {"max_new_tokens": new, "temperature": 1.0}
    ours = [output.ids for output in engine.generate(rows, greedy)]
    seconds = interleaved(
        {
            "greedy": lambda: engine.generate(rows, greedy),
            "greedy_transformers": lambda: generate(model, rows, new, sample=False),
            "sampled": lambda: engine.generate(rows, sampled, range(len(rows))),
            "sampled_transformers": lambda: generate(model, rows, new, sample=True),
            "matmul": Products(setup),
        }
    )
    total = len(rows) * new
    found = {f"{name}_tokens_per_second": round(total / taken) for name, taken in seconds.items()}
    return {
        **found,
        "bandwidth_tokens_per_second": round(total / bandwidth_seconds(setup, bytes_per_second)),
        "greedy_speedup": round(seconds["greedy_transformers"] / seconds["greedy"], 2),
        "sampled_speedup": round(seconds["sampled_transformers"] / seconds["sampled"], 2),
        "share_of_matmul_limit": round(seconds["matmul"] / seconds["sampled"], 2),
        "greedy_identical": ours == generate(model, rows, new, sample=False),
    }


def ragged() -> dict[str, Any]:
    from rl_core.rollouts.hf import HFEngine
    from rl_core.rollouts.sampling import SamplingParams

    hidden, intermediate, layers, vocabulary, prompts, samples, tokens, new = RAGGED
    model = make_model(hidden, intermediate, layers, vocabulary)
    rows = make_prompts(vocabulary, prompts, samples, tokens)
    drawn = np.random.default_rng(0).lognormal(np.log(24), 0.7, len(rows))
    limits = np.clip(drawn, 1, new).astype(int).tolist()
    params = [SamplingParams(max_new_tokens=limit, temperature=0.0) for limit in limits]
    engine = HFEngine(model, Tokenizer(), max_batch=RAGGED_BATCH, max_seq_len=tokens + new)

    def static_batches() -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, len(rows), RAGGED_BATCH):
            part, most = rows[start : start + RAGGED_BATCH], max(limits[start : start + RAGGED_BATCH])
            found += generate(model, part, most, sample=False)
        return [ids[:limit] for ids, limit in zip(found, limits, strict=True)]

    identical = [output.ids for output in engine.generate(rows, params)] == static_batches()
    seconds = interleaved({"ours": lambda: engine.generate(rows, params), "transformers": static_batches})
    return {
        **{f"{name}_tokens_per_second": round(sum(limits) / taken) for name, taken in seconds.items()},
        "speedup": round(seconds["transformers"] / seconds["ours"], 2),
        "greedy_identical": identical,
    }


class InstantEnvironment:
    async def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        from rl_core.api.records import EnvironmentReturn

        rows = len(logs)
        observations = [{"role": "environment", "content": ""}] * rows
        return EnvironmentReturn(
            observations, metadata, None, torch.ones(rows), torch.ones(rows, dtype=torch.bool), None
        )


def through_manager() -> dict[str, Any]:
    from rl_core.rollouts.generation import EngineGenerator
    from rl_core.rollouts.hf import HFEngine
    from rl_core.rollouts.hf.loop import EngineLoop
    from rl_core.rollouts.manager import RolloutManager
    from rl_core.rollouts.sampling import SamplingParams

    hidden, intermediate, layers, vocabulary, prompts, samples, tokens, new = SETUPS["groups_32x8_short"]
    engine = HFEngine(
        make_model(hidden, intermediate, layers, vocabulary), Tokenizer(), max_batch=prompts * samples, max_seq_len=64
    )
    loop = EngineLoop(engine)
    generation = EngineGenerator(loop, SamplingParams(max_new_tokens=new))
    manager = RolloutManager(Tokenizer(), {"task": InstantEnvironment()}, samples, 64, 1, generation)
    groups = [
        {
            "message_log": [{"role": "user", "content": "", "token_ids": torch.tensor(prompt)}],
            "length": tokens,
            "extra_env_info": {"ground_truth": "1"},
            "loss_multiplier": 1.0,
            "idx": index,
            "task_name": "task",
        }
        for index, prompt in enumerate(make_prompts(vocabulary, prompts, 1, tokens))
    ]

    async def step() -> tuple[float, float]:
        start, own = time.process_time(), time.thread_time()
        await asyncio.gather(*[manager.run(group) for group in groups])
        return time.process_time() - start, time.thread_time() - own

    async def main() -> list[tuple[float, float]]:
        return [await step() for _ in range(REPETITIONS + 1)][1:]

    taken = asyncio.run(main())
    loop.close()
    rows = prompts * samples
    return {
        "tokens_per_second": round(rows * new / statistics.median(both for both, _ in taken)),
        "python_milliseconds_per_sample": round(1e3 * statistics.median(own for _, own in taken) / rows, 3),
    }


def main() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    speed = memcpy_bytes_per_second()
    result = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repetitions": REPETITIONS,
        "memcpy_gigabytes_per_second": round(speed / 1e9, 1),
        "fixed_lengths": {name: fixed_lengths(setup, speed) for name, setup in SETUPS.items()},
        "ragged": ragged(),
        "through_manager": through_manager(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
