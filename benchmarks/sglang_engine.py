"""Tokens per second of the SGLang engine through the rollout worker's proxy, over those of `sglang.Engine` alone. Prints JSON.

The same engine settings, random weights of one tiny model, prompts and numbers of tokens for both, temperature 1, log-probabilities
returned. `through` is `rollouts.sglang`: rows over the pipe to the child, one request each, results back as rows end. `alone` is one
process that calls `sglang.Engine.generate` with the whole batch, as its documentation does. One engine at a time, medians over the
repetitions after one that warms up. Without a GPU the figures are of the CPU's torch path: the ratio is what counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from _rows import tokens_made

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 32, 64
CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 43, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
MAX_SEQ_LEN = PROMPT_TOKENS + NEW_TOKENS


def model_files() -> dict[str, bytes]:
    sys.path.insert(0, str(ROOT))
    from tests.integration.rollout_world import tokenizer_files

    return {**tokenizer_files(), "config.json": json.dumps(CONFIG).encode()}


def job():
    from rl_core.api.job import RLJobSpec

    rollout = {"maxBatch": PROMPTS * SAMPLES}
    return RLJobSpec.model_validate({"model": {"path": "unused"}, "data": {"train": "unused"}, "rollout": rollout})


def prompts() -> list[list[int]]:
    distinct = [[2 + (7 * row + 3 * token) % 40 for token in range(PROMPT_TOKENS)] for row in range(PROMPTS)]
    return [prompt for prompt in distinct for _ in range(SAMPLES)]


def measured(generate, repetitions: int) -> dict[str, float]:
    """Return the median of tokens/s of `generate`, which returns the tokens that it made, and what the runs were."""
    generate()
    rates = []
    for _ in range(repetitions):
        began = time.perf_counter()
        tokens = generate()
        rates.append(tokens / (time.perf_counter() - began))
    return {"tokens_per_second": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}


def through(repetitions: int) -> dict[str, float]:
    import torch

    from rl_core.rollouts.sglang.rollout_engine import SGLangRolloutEngine

    engine = SGLangRolloutEngine.build(
        job(), model_files(), "cpu", MAX_SEQ_LEN, lambda tokens: None, lambda stage: None
    )
    try:
        generator = torch.Generator().manual_seed(0)
        shapes = engine.weight_target.names_and_shapes()
        engine.weight_target.load(((n, torch.randn(s, generator=generator) * 0.05) for n, (s, _) in shapes.items()), 1)
        engine.engine.version = 1
        return measured(lambda: tokens_made(engine.engine, prompts(), NEW_TOKENS), repetitions)
    finally:
        engine.close()


def alone(repetitions: int) -> dict[str, float]:
    """In a process of its own: `sglang` kills the whole tree of the process that made the engine when one of its processes dies."""
    import sglang

    from rl_core.rollouts.sglang import setup

    folder = setup.ModelFolder(model_files())
    engine = sglang.Engine(**setup.options(job(), folder.path, "cpu", MAX_SEQ_LEN))
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def generate() -> int:
        answers = engine.generate(input_ids=prompts(), sampling_params=sampling, return_logprob=True)
        return sum(len(answer["output_ids"]) for answer in answers)

    return measured(generate, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="measure the engine alone, in this process")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.repetitions)), flush=True)
        return
    from rl_core.rollouts.sglang import setup

    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--alone", "--repetitions", str(options.repetitions)]
        environ = setup.variables(Path(folder), "cpu")
        process = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    by_itself = json.loads(next(line for line in process.stdout.splitlines() if line.startswith('{"tokens')))
    worker = through(options.repetitions)
    ratio = worker["tokens_per_second"] / by_itself["tokens_per_second"]
    rows = {"prompts": PROMPTS, "samples": SAMPLES, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    print(json.dumps({"rows": rows, "alone": by_itself, "through": worker, "ratio": ratio, "to_reach": 0.95}, indent=1))


if __name__ == "__main__":
    main()
