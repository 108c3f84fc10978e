"""The prefix cache of the real SGLang engine with `weights.onUpdate: keep_kv`: it stays on, and no row reads what other weights left there.

Truth is transformers with the weights of the version.
"""

import concurrent.futures

import pytest
import torch

from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import SGLangWorker
from tests.integration.conftest import ARGUMENTS
from tests.integration.rollout_world import World, random_state, trainer_logprobs, transformers_model

PROMPT = list(range(2, 14))
SLOTS = 2
"""Rows that run at a time; further ones wait in the scheduler."""
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def world():
    spec = {
        "weights": {"onUpdate": "keep_kv"},
        "algorithm": {"promptsPerStep": 4, "groupSize": 4, "maxStaleness": 1, "loss": {"name": "decoupled_ppo"}},
    }
    made = World(SGLangWorker, max_seq_len=64, spec=spec, engine="sglang", maxBatch=SLOTS, engineArgs=ARGUMENTS)
    made.start()
    yield made
    made.close()


@pytest.fixture
def model(world):
    """Publish the next version; return what transformers makes of it."""
    return published(world)


def published(world):
    state = random_state(world.version + 1)
    world.publish_next(state)
    return transformers_model(state)


def published_over_rows(world):
    """Publish the next version while rows run: they are held first, so that none ends before the update."""
    world.on_loop(world.worker.pause_generation("in_place"))
    return published(world)


def begin(world, prompt, params, **row):
    """Start a row; return the future of its output."""
    future = concurrent.futures.Future()

    def sink(results):
        for _, result in results:
            (future.set_exception if isinstance(result, BaseException) else future.set_result)(result)

    world.engine.engine.submit([Row(key=future, prompt=prompt, params=params, seed=1, **row)], sink)
    return future


def complete(world, prompt):
    """Return a short completion of `prompt`, and how many tokens of the prompt were found in the cache."""
    before = world.engine.load().cached_tokens
    output = begin(world, prompt, SHORT).result(60)
    return output, world.engine.load().cached_tokens - before


def difference(output, model, prompt):
    return (torch.tensor(output.logprobs) - trainer_logprobs(model, prompt, output.ids)).abs().max()


def test_a_repeated_prompt_is_found_in_the_cache_within_a_version_and_not_across_versions(world, model):
    for _ in range(3):
        first, cached = complete(world, PROMPT)
        assert cached == 0
        again, cached = complete(world, PROMPT)
        assert cached == len(PROMPT) - 1, "the last token of a prompt is always computed"
        for output in (first, again):
            assert output.versions == [(0, SHORT.max_new_tokens, world.version)]
            assert difference(output, model, PROMPT) < 1e-4
        model = published(world)


def running(world, count):
    """Start rows that run over the next update; return the futures of their outputs once each of them has a token."""
    started = [concurrent.futures.Future() for _ in range(count)]

    def on_tokens(ids, at):
        if not at.done():
            at.set_result(ids)

    rows = [begin(world, PROMPT, LONG, on_tokens=lambda ids, at=at: on_tokens(ids, at)) for at in started]
    for at in started:
        at.result(60)
    return rows


def test_a_row_that_waits_in_the_scheduler_during_an_update_reads_nothing_of_the_weights_before(world, model):
    complete(world, PROMPT)
    rows, before = running(world, SLOTS), world.engine.load().cached_tokens
    waiting = begin(world, PROMPT, SHORT)
    world.engine.engine.call("alive").result(60)  # the child has the row
    model = published_over_rows(world)
    output = waiting.result(60)
    ended = [row.result(60) for row in rows]
    assert all(len(row.versions) == 2 for row in ended), "the update came while they ran, and they kept their places"
    assert output.versions == [(0, SHORT.max_new_tokens, world.version)]
    assert difference(output, model, PROMPT) < 1e-4
    # Rows are counted as they end: those that ran had found the prompt but for its last token.
    assert world.engine.load().cached_tokens - before == SLOTS * (len(PROMPT) - 1)


def test_what_a_row_over_an_update_leaves_in_the_cache_serves_no_row_of_the_new_weights(world, model):
    for _ in range(5):  # on a busy machine a row may end before the update begins
        (row,) = running(world, 1)
        model = published_over_rows(world)
        kept = row.result(60)
        if len(kept.versions) == 2:
            break
    assert len(kept.versions) == 2
    prompt = [*PROMPT, *kept.ids[:-1]]
    for wanted in (0, len(prompt) - 1):
        output, cached = complete(world, prompt)
        assert cached == wanted
        assert difference(output, model, prompt) < 1e-4
