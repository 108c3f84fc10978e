"""The engine behind the generation interface: shapes, versions, refusals, concurrency, cancellation."""

import asyncio
import threading
import time

import pytest
import torch

from rl_core.api.errors import GenerationUnavailable, RolloutConfigError
from rl_core.rollouts.hf import HFEngine, HFGeneration
from rl_core.rollouts.hf.config import DecoderConfig
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
PAD = 63


class Tokenizer:
    eos_token_id, pad_token_id = 0, PAD

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
def generation():
    made = HFGeneration(engine(), {"max_new_tokens": 10, "_pad_token_id": PAD})
    yield made
    made.shutdown()


def data(*rows, **more):
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return {
        "input_ids": ids,
        "input_lengths": torch.tensor([len(row) for row in rows]),
        "stop_strings": [None] * len(rows),
        **more,
    }


def test_rows_come_back_in_order_right_padded_with_zeros_on_the_prompt(generation):
    generation.engine.serve(4)
    rows = [[5, 6, 7], [8], [9, 10]]
    out = generation.generate(data(*rows, seeds=[1, 2, 3]))
    for index, row in enumerate(rows):
        new, total = int(out["generation_lengths"][index]), int(out["unpadded_sequence_lengths"][index])
        assert out["output_ids"][index, : len(row)].tolist() == row and total == len(row) + new
        assert (out["output_ids"][index, total:] == PAD).all()
        assert not out["logprobs"][index, : len(row)].any() and not out["logprobs"][index, total:].any()
        assert (out["logprobs"][index, len(row) : total] < 0).all()
        assert out["policy_versions"][index] == [(0, new, 4)]
        assert bool(out["truncated"][index]) == (out["finish_reasons"][index] != "stop")
    assert out["output_ids"].dtype == torch.int64 and out["logprobs"].dtype == torch.float32


async def test_one_row_requests_give_what_the_batch_gives(generation):
    rows = [[5, 6, 7], [8], [9, 10], [11, 12]]
    batch = generation.generate(data(*rows, seeds=[1, 2, 3, 4]))

    async def one(row, seed):
        return [item async for item in generation.generate_async(data(row, seeds=[seed]))]

    found = await asyncio.gather(*[one(row, seed) for row, seed in zip(rows, (1, 2, 3, 4), strict=True)])
    for index, ((number, out),) in enumerate(found):
        total = int(out["unpadded_sequence_lengths"][0])
        assert number == 0 and out["output_ids"][0].tolist() == batch["output_ids"][index, :total].tolist()


async def test_rows_of_one_request_are_yielded_as_they_finish(generation):
    request = data([5], [6], [7], seeds=[1, 2, 3], max_new_tokens=[9, 1, 4])
    order = [
        (index, int(out["generation_lengths"][0]))
        async for index, out in generation.generate_async(request, greedy=True)
    ]
    lengths = dict(order)
    assert set(lengths) == {0, 1, 2} and lengths[1] == 1
    assert [lengths[index] for index, _ in order] == sorted(lengths.values())


def test_greedy_ignores_seeds(generation):
    one, two = (generation.generate(data([5, 6], seeds=[s]), greedy=True) for s in (1, 2))
    assert one["output_ids"].equal(two["output_ids"])


def test_a_prompt_without_room_comes_back_as_it_is(generation):
    for length in (48, 60):
        out = generation.generate(data([5] * length, [6]))
        assert out["output_ids"][0, :length].tolist() == [5] * length and int(out["generation_lengths"][0]) == 0
        assert bool(out["truncated"][0]) and out["finish_reasons"][0] == "seq_limit" and out["policy_versions"][0] == []


@pytest.mark.parametrize("row", [[PAD, PAD, 5, 6], [5, PAD, 6, PAD], [PAD, 5, 6, PAD]], ids=["left", "inside", "both"])
def test_padding_on_the_left_or_inside_is_refused(generation, row):
    for length in (2, 3):
        with pytest.raises(ValueError, match="right-padded"):
            generation.generate({"input_ids": torch.tensor([row]), "input_lengths": torch.tensor([length])})


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_that_the_row_does_not_have_is_refused(generation, length):
    with pytest.raises(ValueError, match=rf"input_lengths must be in \[0, 3\].* got {length} in row 0"):
        generation.generate({**data([5, 6, 7]), "input_lengths": torch.tensor([length])})


def test_an_empty_batch_keeps_the_types_of_its_columns(generation):
    empty = {"input_ids": torch.zeros(0, 3, dtype=torch.int64), "input_lengths": torch.zeros(0, dtype=torch.int64)}
    output = generation.generate(empty)
    assert (output["output_ids"].dtype, output["truncated"].dtype) == (torch.int64, torch.bool)
    assert output["finish_reasons"] == []


def test_stops_of_configuration_and_row_both_count_and_stay_in_the_text(generation):
    free = generation.generate(data([5, 6], seeds=[3]))
    text = Tokenizer().decode(free["output_ids"][0, 2:])
    made = HFGeneration(
        generation.loop, {"max_new_tokens": 10, "stop_strings": ["\x01", text[4]], "_pad_token_id": PAD}
    )
    request = data([5, 6], seeds=[3])
    by_config = made.generate(request)
    assert Tokenizer().decode(by_config["output_ids"][0, 2:]) == text[: text.index(text[4]) + 1]
    by_row = made.generate({**request, "stop_strings": [[text[2]]]})
    assert by_row["finish_reasons"] == ["stop"]
    assert Tokenizer().decode(by_row["output_ids"][0, 2:]) == text[: min(text.index(text[2]), text.index(text[4])) + 1]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"bad_words": ["x"]}, "bad_words"),
        ({"val_temprature": 0.0}, "val_temprature are not honoured"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"port_range": (1, 2)}, "port_range"),
        ({"backend": "sglang"}, "backend must be 'hf'"),
        ({"use_async_rollouts": False}, "use_async_rollouts must be true"),
        ({"colocated": {"enabled": True}}, "colocated.enabled"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"top_p": 0.9}, "bias the policy ratio"),
        ({"top_k": 5}, "bias the policy ratio"),
    ],
)
def test_settings_that_are_not_honoured_or_would_bias_training_are_refused(config, match):
    with pytest.raises(RolloutConfigError, match=match):
        HFGeneration(engine(), config)


def test_truncated_sampling_is_taken_on_request_and_in_validation():
    HFGeneration(
        engine(), {"top_p": 0.9, "bad_words": None, "colocated": {"enabled": False}}, allow_truncated_sampling=True
    )
    made = HFGeneration(engine(), {"temperature": 0.0, "val_temperature": 0.7, "val_top_k": 3}, validation=True)
    assert (made._base.temperature, made._base.top_k) == (0.7, 3)


async def test_a_cancelled_request_leaves_the_engine(generation):
    async def consume(row):
        async for item in generation.generate_async(data(row, seeds=[1])):
            return item

    kept = asyncio.ensure_future(consume([5, 6]))
    gone = asyncio.ensure_future(consume([7, 8]))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await kept)[1]["output_ids"].shape[0] == 1
    while not generation.loop.idle:
        await asyncio.sleep(0.001)
    assert generation.engine.num_running == 0


async def test_a_failing_step_fails_its_rows_and_the_engine_goes_on(generation, monkeypatch):
    broken = {"left": 1}
    step = generation.engine.step

    def fail_once():
        if broken["left"]:
            broken["left"] -= 1
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(generation.engine, "step", fail_once)
    with pytest.raises(GenerationUnavailable, match="out of memory") as caught:
        await anext(generation.generate_async(data([5, 6], seeds=[1])))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (await anext(generation.generate_async(data([5, 6], seeds=[1]))))[0] == 0


async def test_a_failing_prefill_costs_its_own_rows_only(generation, monkeypatch):
    wanted = generation.generate(data([5, 6], seeds=[1]))["output_ids"].tolist()
    with monkeypatch.context() as patch:
        patch.setattr(generation.engine._decoder, "_hidden", lambda *_: 1 / 0)
        with pytest.raises(GenerationUnavailable, match="ZeroDivisionError"):
            await anext(generation.generate_async(data([7, 8, 9], seeds=[2])))
    assert (await anext(generation.generate_async(data([5, 6], seeds=[1]))))[1]["output_ids"].tolist() == wanted


def test_held_nothing_generates_and_released_what_was_interrupted_and_what_came_meanwhile_goes_on(generation):
    loop, heard, ended = generation.loop, {}, threading.Event()

    def hear(results):
        heard.update(results)
        if len(heard) == 3:
            ended.set()

    def row(key):
        return Row(key=key, prompt=[5, key], params=SamplingParams(max_new_tokens=40, ignore_eos=True), seed=key)

    wanted = generation.engine.generate([[5, key] for key in (1, 2, 3)], row(1).params, [1, 2, 3])
    loop.hold()
    loop.submit([row(1)], hear)
    loop.release()
    while not loop.statistics()["tokens"] and not generation.engine.num_running:
        time.sleep(0.001)
    loop.submit([row(2)], hear)
    loop.hold()
    assert generation.engine.num_running == 0
    steps = loop.statistics()["steps"]
    loop.submit([row(3)], hear)
    loop.hold()
    assert loop.statistics()["steps"] == steps and 3 not in heard
    generation.engine.serve(4)
    loop.release()
    assert ended.wait(60)
    assert [heard[key].ids for key in (1, 2, 3)] == [one.ids for one in wanted]
    assert heard[3].versions == [(0, 40, 4)]


def test_an_engine_that_closes_while_it_is_held_lets_nobody_wait(generation):
    heard = []
    generation.loop.hold()
    generation.loop.submit([Row(key="a", prompt=[5], params=SamplingParams(max_new_tokens=9), seed=1)], heard.extend)
    generation.shutdown()
    generation.loop.hold()
    assert [key for key, _ in heard] == ["a"]


async def test_after_shutdown_requests_fail_and_waiting_ones_too(generation):
    generation.shutdown()
    generation.shutdown()
    with pytest.raises(GenerationUnavailable, match="shut down"):
        await anext(generation.generate_async(data([5])))


def test_rows_that_run_or_wait_as_the_engine_closes_fail(generation, monkeypatch):
    begun, go_on, heard = threading.Event(), threading.Event(), []
    step = generation.engine.step
    monkeypatch.setattr(generation.engine, "step", lambda: (begun.set(), go_on.wait(), step())[2])
    rows = [Row(key=key, prompt=[5], params=SamplingParams(max_new_tokens=9), seed=1) for key in "ab"]
    generation.loop.submit(rows[:1], heard.extend)
    begun.wait()
    generation.loop.submit(rows[1:], heard.extend)
    closing = threading.Thread(target=generation.shutdown)
    closing.start()
    while not generation.loop._closed:
        time.sleep(0.001)
    go_on.set()
    closing.join()
    assert sorted(key for key, _ in heard) == ["a", "b"]
    assert all(isinstance(error, GenerationUnavailable) for _, error in heard)


async def test_groups_wait_to_be_complete_and_run_apart():
    made = HFGeneration(engine(), {"max_new_tokens": 6, "_pad_token_id": PAD}, batches_by_group=True)
    sizes = []
    prefill = made.engine._decoder.prefill
    made.engine._decoder.prefill = lambda prompts, rows: sizes.append(len(rows)) or prefill(prompts, rows)
    try:

        async def one(name, index):
            request = data([5, 6], seeds=[index], batch_keys=[(name, 3)])
            return [item async for item in made.generate_async(request)]

        tasks = [asyncio.ensure_future(one(name, index)) for index in range(2) for name in "ab"]
        await asyncio.sleep(0.05)
        assert sizes == [] and not any(task.done() for task in tasks)
        await asyncio.gather(*tasks, one("a", 2), one("b", 2))
        assert sizes == [3, 3]
        await anext(made.generate_async(data([7], seeds=[1])))
        assert sizes == [3, 3, 1]
    finally:
        made.shutdown()


def test_metrics_count_since_the_last_clear(generation):
    generation.generate(data([5], [6], seeds=[1, 2], max_new_tokens=[3, 3]))
    found = generation.get_logger_metrics()
    assert (
        found["generation/rows"] == 2 and 2 <= found["generation/tokens"] <= 6 and found["generation/busy_seconds"] > 0
    )
    # A row makes one token per step, the one that ends it included.
    assert found["generation/mean_batch"] * found["generation/steps"] == pytest.approx(found["generation/tokens"])
    generation.clear_logger_metrics()
    assert generation.get_logger_metrics()["generation/rows"] == 0
