"""The HF engine behind `EngineGenerator`: versions, limits, refusals, concurrency, cancellation."""

import asyncio
import threading
import time

import pytest
import torch

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable
from rl_core.api.job import RLJobSpec
from rl_core.rollouts.engine import PROVEN, UNPROVEN
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf import HFEngine
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.rollout_engine import HFRolloutEngine
from rl_core.rollouts.hf.weight_target import HFWeightTarget
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.rows import Row
from rl_core.rollouts.sampling import SamplingParams

RAW = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class Tokenizer:
    eos_token_id = 0

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(32 + int(i)) for i in ids)


def engine(**options):
    weights = DecoderWeights(DecoderConfig.from_dict(RAW))
    generator = torch.Generator().manual_seed(0)
    weights.load(
        [
            (n, torch.ones(s) if "norm" in n else torch.randn(s, generator=generator) * 0.3)
            for n, s in weights.names_and_shapes().items()
        ]
    )
    return HFEngine(weights, Tokenizer(), **{"max_batch": 8, "max_seq_len": 48, **options})


@pytest.fixture
def loop():
    made = EngineLoop(engine())
    yield made
    made.close()


@pytest.fixture
def generation(loop):
    return EngineGenerator(loop, SamplingParams(max_new_tokens=10))


async def generated(generation, *rows, seeds=None, **request):
    """Return the outputs of rows that are requested together."""
    seeds = seeds or range(1, len(rows) + 1)
    calls = [generation.generate_row(row, seed=seed, **request) for row, seed in zip(rows, seeds, strict=True)]
    return await asyncio.gather(*calls)


async def test_rows_come_back_in_order_with_a_log_probability_and_a_version_per_token(generation, loop):
    loop.engine.serve(4)
    outputs = await generated(generation, [5, 6, 7], [8], [9, 10])
    assert generation.policy_version == 4
    for output in outputs:
        assert 1 <= len(output.ids) <= 10 and len(output.logprobs) == len(output.ids)
        assert all(logprob < 0 for logprob in output.logprobs)
        assert output.versions == [(0, len(output.ids), 4)]


async def test_rows_requested_one_by_one_are_those_of_the_engine(generation):
    rows = [[5, 6, 7], [8], [9, 10], [11, 12]]
    wanted = engine().generate(rows, SamplingParams(max_new_tokens=10), [1, 2, 3, 4])
    for row, seed, output in zip(rows, (1, 2, 3, 4), wanted, strict=True):
        assert (await generation.generate_row(row, seed=seed)).ids == output.ids


async def test_rows_requested_in_one_moment_reach_the_engine_together(generation, loop, monkeypatch):
    submitted, submit = [], loop.submit
    monkeypatch.setattr(loop, "submit", lambda rows, sink: (submitted.append(len(rows)), submit(rows, sink))[1])
    await generated(generation, [5], [6], [7])
    assert submitted == [3]


async def test_a_row_may_have_a_limit_of_its_own(generation):
    (output,) = await generated(generation, [5], max_new_tokens=1)
    assert len(output.ids) == 1


async def test_greedy_ignores_seeds(generation):
    one, two = [await generated(generation, [5, 6], seeds=[seed], greedy=True) for seed in (1, 2)]
    assert one == two


async def test_a_prompt_that_fills_the_sequence_ends_without_a_token_and_a_longer_one_is_refused(generation):
    (output,) = await generated(generation, [5] * 48)
    assert (output.ids, output.finish_reason, output.versions) == ([], "seq_limit", [])
    for prompt, words in (([5] * 49, "got 49"), ([], "got 0"), ([64], "got 64 to 64")):
        with pytest.raises(ValueError, match=words):
            await generation.generate_row(prompt, seed=1)


async def test_stops_of_settings_and_row_both_count_and_stay_in_the_text(generation, loop):
    decode = Tokenizer().decode
    (free,) = await generated(generation, [5, 6], seeds=[3])
    text = decode(free.ids)
    stopping = EngineGenerator(loop, SamplingParams(max_new_tokens=10, stop_strings=("\x01", text[4])))
    (by_settings,) = await generated(stopping, [5, 6], seeds=[3])
    assert decode(by_settings.ids) == text[: text.index(text[4]) + 1]
    (by_row,) = await generated(stopping, [5, 6], seeds=[3], stop_strings=[text[2]])
    assert by_row.finish_reason == "stop"
    assert decode(by_row.ids) == text[: min(text.index(text[2]), text.index(text[4])) + 1]


async def test_a_cancelled_request_leaves_the_engine(generation, loop):
    kept = asyncio.ensure_future(generation.generate_row([5, 6], seed=1))
    cancelled = asyncio.ensure_future(generation.generate_row([7, 8], seed=1, max_new_tokens=40))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await kept).ids
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    while not loop.idle:
        await asyncio.sleep(0.001)
    assert loop.engine.num_running == 0


async def test_a_failing_step_fails_its_rows_and_the_engine_goes_on(generation, loop, monkeypatch):
    broken = {"left": 1}
    step = loop.engine.step

    def fail_once():
        if broken["left"]:
            broken["left"] -= 1
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(loop.engine, "step", fail_once)
    with pytest.raises(GenerationUnavailable, match="out of memory") as caught:
        await generation.generate_row([5, 6], seed=1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (await generation.generate_row([5, 6], seed=1)).ids


async def test_a_failing_prefill_costs_its_own_rows_only(generation, loop, monkeypatch):
    wanted = await generation.generate_row([5, 6], seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop.engine._decoder, "_hidden", lambda *_: 1 / 0)
        with pytest.raises(GenerationUnavailable, match="ZeroDivisionError"):
            await generation.generate_row([7, 8, 9], seed=2)
    assert await generation.generate_row([5, 6], seed=1) == wanted


def test_paused_nothing_generates_and_resumed_the_interrupted_and_the_queued_rows_continue(loop):
    results, ended = {}, threading.Event()

    def sink(batch):
        results.update(batch)
        if len(results) == 3:
            ended.set()

    def row(key):
        return Row(key=key, prompt=[5, key], params=SamplingParams(max_new_tokens=40, ignore_eos=True), seed=key)

    wanted = loop.engine.generate([[5, key] for key in (1, 2, 3)], row(1).params, [1, 2, 3])
    steps, step = [], loop.engine.step
    loop.engine.step = lambda: (steps.append(1), step())[1]
    loop.pause()
    loop.submit([row(1)], sink)
    loop.resume()
    while not results and not loop.engine.num_running:
        time.sleep(0.001)
    loop.submit([row(2)], sink)
    loop.pause()
    assert loop.engine.num_running == 0
    before = len(steps)
    loop.submit([row(3)], sink)
    loop.pause()
    assert len(steps) == before and 3 not in results
    loop.engine.serve(4)
    loop.resume()
    assert ended.wait(60)
    assert [results[key].ids for key in (1, 2, 3)] == [output.ids for output in wanted]
    assert results[3].versions == [(0, 40, 4)]


def test_closing_a_paused_engine_fails_its_rows(loop):
    results = []
    loop.pause()
    loop.submit([Row(key="a", prompt=[5], params=SamplingParams(max_new_tokens=9), seed=1)], results.extend)
    loop.close()
    loop.pause()
    assert [key for key, _ in results] == ["a"]


async def test_a_closed_engine_refuses_rows(generation, loop):
    loop.close()
    loop.close()
    with pytest.raises(GenerationUnavailable, match="shut down"):
        await generation.generate_row([5], seed=1)


def test_rows_that_run_or_wait_as_the_engine_closes_fail(loop, monkeypatch):
    begun, proceed, results = threading.Event(), threading.Event(), []
    step = loop.engine.step
    monkeypatch.setattr(loop.engine, "step", lambda: (begun.set(), proceed.wait(), step())[2])
    rows = [Row(key=key, prompt=[5], params=SamplingParams(max_new_tokens=9), seed=1) for key in "ab"]
    loop.submit(rows[:1], results.extend)
    begun.wait()
    loop.submit(rows[1:], results.extend)
    closing = threading.Thread(target=loop.close)
    closing.start()
    while not loop._closed:
        time.sleep(0.001)
    proceed.set()
    closing.join()
    assert sorted(key for key, _ in results) == ["a", "b"]
    assert all(isinstance(error, GenerationUnavailable) for _, error in results)


async def test_groups_wait_to_be_complete_and_run_apart(loop):
    by_group = EngineGenerator(loop, SamplingParams(max_new_tokens=6), batches_by_group=True)
    sizes = []
    prefill = loop.engine._decoder.prefill
    loop.engine._decoder.prefill = lambda prompts, rows: sizes.append(len(rows)) or prefill(prompts, rows)

    def request(name, index):
        return by_group.generate_row([5, 6], seed=index, group=(name, 3))

    tasks = [asyncio.ensure_future(request(name, index)) for index in range(2) for name in "ab"]
    await asyncio.sleep(0.05)
    assert sizes == [] and not any(task.done() for task in tasks)
    await asyncio.gather(*tasks, request("a", 2), request("b", 2))
    assert sizes == [3, 3]
    await by_group.generate_row([7], seed=1)
    assert sizes == [3, 3, 1]


async def test_a_group_that_lost_a_row_before_it_was_complete_takes_another(loop):
    by_group = EngineGenerator(loop, SamplingParams(max_new_tokens=6), batches_by_group=True)
    cancelled = asyncio.ensure_future(by_group.generate_row([5, 6], seed=1, group=("a", 2)))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    outputs = await asyncio.gather(*[by_group.generate_row([5, 6], seed=seed, group=("a", 2)) for seed in (2, 3)])
    assert all(output.ids for output in outputs)


async def test_tokens_are_reported_while_a_row_runs_also_over_an_interruption(loop):
    generation = EngineGenerator(loop, SamplingParams(max_new_tokens=40, ignore_eos=True))
    reported, five = [], asyncio.Event()

    def on_tokens(ids):
        reported.append(ids)
        if len(reported) == 5:
            five.set()

    alone = await generation.generate_row([5, 6], seed=7)
    watched = asyncio.ensure_future(generation.generate_row([5, 6], seed=7, on_tokens=on_tokens))
    other = asyncio.ensure_future(generation.generate_row([9, 8], seed=8))
    await five.wait()
    await asyncio.to_thread(loop.pause)
    loop.resume()
    output = await watched
    await other
    assert output.ids == alone.ids
    assert [token for ids in reported for token in ids] == output.ids[:-1]
    assert len(reported) == 39  # one token a step; the last one is in the output


@pytest.fixture
def held_step(loop, monkeypatch):
    """Return two events: a step of the engine has begun; it may go on."""
    step, began, goes_on = loop.engine.step, threading.Event(), threading.Event()

    def slow():
        began.set()
        assert goes_on.wait(60)
        return step()

    monkeypatch.setattr(loop.engine, "step", slow)
    return began, goes_on


async def test_weights_are_written_only_when_the_step_of_a_row_that_was_aborted_has_ended(loop, held_step):
    """With weights.onUpdate wait nothing pauses the engine before, and an aborted row leaves it at the end of its step."""
    began, goes_on = held_step
    row = Row(key="k", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=20, ignore_eos=True), seed=1)
    loop.submit([row], lambda results: None)
    assert await asyncio.to_thread(began.wait, 60)
    loop.abort(["k"])
    target = HFWeightTarget(loop)
    with pytest.raises(DeadlineExceeded, match="must end within 0.01 s"):
        await target.prepare(0.01)
    goes_on.set()
    await target.prepare(60)
    state = {name: torch.ones(shape) for name, shape in loop.engine.names_and_shapes().items()}
    target.load(iter(state.items()), 7)
    await target.resume(7, "")
    assert loop.version == 7
    output = (await generated(EngineGenerator(loop, SamplingParams(max_new_tokens=3, ignore_eos=True)), [5, 6]))[0]
    assert output.versions == [(0, 3, 7)]


async def test_a_pause_that_nobody_waits_for_any_more_ends_when_generation_goes_on(loop, held_step):
    began, goes_on = held_step
    loop.submit(
        [Row(key="k", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=20), seed=1)], lambda results: None
    )
    assert await asyncio.to_thread(began.wait, 60)
    pausing = asyncio.create_task(asyncio.to_thread(loop.pause))
    while not loop._paused:
        await asyncio.sleep(0)
    loop.resume()
    await asyncio.wait_for(pausing, 60)
    goes_on.set()


def test_a_second_pause_does_not_change_what_rows_keep(loop):
    loop.pause(keep_cache=True)
    loop.pause()
    assert loop._keep_cache


@pytest.mark.parametrize(("device", "proof"), [("cpu", PROVEN), ("meta", UNPROVEN)])
def test_weights_are_called_proven_only_where_the_engine_s_own_tensors_are_read(device, proof):
    weights = DecoderWeights(DecoderConfig.from_dict(RAW), device=device)
    built = HFRolloutEngine(
        RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}),
        EngineLoop(HFEngine(weights, Tokenizer(), max_batch=2, max_seq_len=8)),
    )
    assert built.weights_proof == proof
