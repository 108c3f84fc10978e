"""Rows through the engine of a rollout worker, as `submit` takes them."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any


def tokens_made(engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Return how many tokens `engine` made of one row per prompt, all at once, `new_tokens` each."""
    from rl_core.rollouts.rows import Row
    from rl_core.rollouts.sampling import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    rows = [Row(key=number, prompt=ids, params=params, seed=number) for number, ids in enumerate(prompts)]
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    found: list[Any] = []

    def sink(results: Sequence[Any]) -> None:
        found.extend(results)
        if len(found) == len(rows):
            done.set_result(None)

    engine.submit(rows, sink)
    done.result()
    return sum(len(output.ids) for _, output in found)
