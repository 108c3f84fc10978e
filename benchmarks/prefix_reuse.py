"""Tokens that SGLang prefills in sessions of 10 turns: all calls of a session at one rollout, as the router sends them, or each at any. Prints JSON.

Each turn reads the conversation so far and 32 new tokens, and samples 16; the first one reads 256. `session`: each session stays at the rollout
that began it. `random`: each call goes to a rollout that is drawn at random. One real engine stands for all rollouts: the prompts of a rollout
begin with a token of its own, so that none finds a prefix of another's in the cache. Prefilled are the tokens of prompts that the engine did not
find in its prefix cache, as it counts them.
"""

import argparse
import json
import random
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sglang_engine import CONFIG, job, model_files

ROLLOUTS, SESSIONS, TURNS = 16, 16, 10
FIRST_TOKENS, ADDED_TOKENS, NEW_TOKENS = 256, 32, 16
MAX_SEQ_LEN = 1 + FIRST_TOKENS + TURNS * (ADDED_TOKENS + NEW_TOKENS)
WORDS = range(2 + ROLLOUTS, 43)
"""Token ids of conversations; ids from 2 on name the rollouts."""


def sampled(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return what the engine continues `prompts` with."""
    from rl_core.rollouts.rows import Row
    from rl_core.rollouts.sampling import SamplingParams

    ids: dict[Any, list[int]] = {}
    done = threading.Event()

    def sink(results: Any) -> None:
        for key, output in results:
            ids[key] = output.ids
        if len(ids) == len(prompts):
            done.set()

    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    engine.submit([Row(key=n, prompt=prompt, params=params, seed=n) for n, prompt in enumerate(prompts)], sink)
    assert done.wait(300)
    return [ids[n] for n in range(len(prompts))]


def prefilled(engine: Any, seed: int, *, pinned: bool) -> int:
    """Hold all sessions; return how many tokens the engine prefilled for them."""
    draw = random.Random(seed)
    before = engine.load()
    histories = [draw.choices(WORDS, k=FIRST_TOKENS) for _ in range(SESSIONS)]
    homes = [session % ROLLOUTS for session in range(SESSIONS)]
    for _ in range(TURNS):
        places = homes if pinned else [draw.randrange(ROLLOUTS) for _ in histories]
        prompts = [[2 + place, *history] for place, history in zip(places, histories, strict=True)]
        for history, ids in zip(histories, sampled(engine, prompts), strict=True):
            history += ids + draw.choices(WORDS, k=ADDED_TOKENS)
    after = engine.load()
    return (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)


def measure(repetitions: int) -> dict[str, Any]:
    import torch

    from rl_core.rollouts.sglang.rollout_engine import SGLangRolloutEngine

    CONFIG["max_position_embeddings"] = 1024
    built = SGLangRolloutEngine.build(job(), model_files(), "cpu", MAX_SEQ_LEN, lambda tokens: None, lambda stage: None)
    try:
        generator = torch.Generator().manual_seed(0)
        shapes = built.weight_target.names_and_shapes()
        built.weight_target.load(((n, torch.randn(s, generator=generator) * 0.05) for n, (s, _) in shapes.items()), 1)
        built.engine.version = 1
        seeds = range(repetitions)
        session = [prefilled(built.engine, 2 * seed, pinned=True) for seed in seeds]
        placed = [prefilled(built.engine, 2 * seed + 1, pinned=False) for seed in seeds]
    finally:
        built.close()
    fewer = statistics.median(placed) / statistics.median(session)
    return {"rollouts": ROLLOUTS, "sessions": SESSIONS, "session": session, "random": placed, "fewer": fewer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    print(json.dumps(measure(parser.parse_args().repetitions), indent=1))


if __name__ == "__main__":
    main()
