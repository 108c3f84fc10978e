"""The engine on a tiny decoder of its own: batches, limits, stops, weights. Parity with transformers: tests/integration."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import DataError, RolloutConfigError
from rl_core.cpu import products
from rl_core.rollouts.hf import HFEngine
from rl_core.rollouts.hf.cache import KVCache
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.decoder import LeanDecoder, fused_attention
from rl_core.rollouts.hf.rope import deinterleave, interleave
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.sampling import SamplingParams

RAW = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def named(seed=0, raw=RAW):
    generator = torch.Generator().manual_seed(seed)
    shapes = DecoderWeights(DecoderConfig.from_dict(raw)).names_and_shapes()
    return {n: torch.ones(s) if "norm" in n else torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}


class AsciiTokenizer:
    """Ids are printable characters; 0 ends a sequence."""

    eos_token_id = 0

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(31 + i) for i in ids)


def make(*, max_batch=8, max_seq_len=64, raw=RAW, seed=0, **options):
    weights = DecoderWeights(DecoderConfig.from_dict(raw))
    weights.load(named(seed, raw).items())
    return HFEngine(weights, AsciiTokenizer(), max_batch=max_batch, max_seq_len=max_seq_len, **options)


def prompts(count, seed=0, longest=20):
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 96, size=int(generator.integers(1, longest + 1))).tolist() for _ in range(count)]


def close(one, other, tolerance=1e-5):
    return (
        one.ids == other.ids
        and np.allclose(one.logprobs, other.logprobs, atol=tolerance)
        and one.finish_reason == other.finish_reason
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 14))
def test_a_row_depends_on_its_prompt_and_seed_not_on_the_batch(seed, max_batch, count):
    engine, alone = make(max_batch=max_batch), make(max_batch=1)
    given_prompts = prompts(count, seed)
    params = [SamplingParams(max_new_tokens=1 + (seed + i) % 30) for i in range(count)]
    seeds = [seed * 100 + i for i in range(count)]
    together = engine.generate(given_prompts, params, seeds)
    for prompt, one, s, output in zip(given_prompts, params, seeds, together, strict=True):
        assert close(output, alone.generate([prompt], one, [s])[0])
    assert not engine.busy


def test_compiled_decoding_generates_the_same():
    params, given_prompts = SamplingParams(max_new_tokens=6), prompts(3)
    plain, compiled = (make(compile=flag).generate(given_prompts, params, [1, 2, 3]) for flag in (False, True))
    assert all(close(one, other) for one, other in zip(plain, compiled, strict=True))


def test_compile_is_refused_where_nothing_can_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RolloutConfigError, match=r"rollout.compile needs a C\+\+ compiler .* set rollout.compile: false"
    ):
        make(compile=True)


def test_rows_join_a_running_batch_and_end_without_disturbing_others():
    engine = make(max_batch=4)
    alone = {i: make().generate([p], SamplingParams(max_new_tokens=20), [i])[0] for i, p in enumerate(prompts(10))}
    waiting = list(enumerate(prompts(10)))
    tickets, outputs = {}, {}
    step = 0
    while len(outputs) < 10:
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop()
            tickets[engine.submit(prompt, SamplingParams(max_new_tokens=20), index)] = index
        outputs.update({tickets[ticket]: output for ticket, output in engine.step()})
        step += 1
    assert all(close(outputs[i], alone[i]) for i in range(10))


def test_prompts_of_a_group_are_computed_once(monkeypatch):
    engine = make()
    seen = []
    prefill = engine._decoder.prefill
    monkeypatch.setattr(
        engine._decoder, "prefill", lambda p, rows: seen.append((len(p), rows.tolist())) or prefill(p, rows)
    )
    outputs = engine.generate([[5, 6, 7]] * 3 + [[8, 9]] * 2, SamplingParams(max_new_tokens=8), [1, 2, 3, 1, 2])
    assert seen == [(2, [0, 0, 0, 1, 1])]
    assert outputs[0].ids != outputs[1].ids


@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN, rows padded", "MKL"])
@pytest.mark.parametrize("columns", [40, 64, 400])
def test_long_use_of_the_same_columns_stays_exact(columns, onednn, monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: onednn)
    engine = make(max_batch=3, max_seq_len=columns)
    sampling = SamplingParams(max_new_tokens=25)
    given_prompts = prompts(24, seed=3, longest=12)
    found = engine.generate(given_prompts, sampling, range(24))
    for index in (0, 11, 23):
        assert close(found[index], make(max_seq_len=columns).generate([given_prompts[index]], sampling, [index])[0])


@pytest.mark.parametrize(
    ("length", "new", "count", "reason"),
    [(4, 3, 3, "length"), (60, 10, 4, "seq_limit"), (60, 4, 4, "length"), (64, 5, 0, "seq_limit"), (4, 0, 0, "length")],
)
def test_the_shorter_of_both_limits_ends_a_row(length, new, count, reason):
    (output,) = make().generate([[5] * length], SamplingParams(max_new_tokens=new, ignore_eos=True), [1])
    assert (len(output.ids), output.finish_reason) == (count, reason)
    assert output.versions == ([(0, count, 0)] if count else [])


@pytest.mark.parametrize("length", [0, 65])
def test_a_prompt_that_can_never_fit_is_refused_with_numbers(length):
    with pytest.raises(ValueError, match=f"1 to max_seq_len=64 tokens, got {length}"):
        make().generate([[5] * length], SamplingParams(), [1])


@pytest.mark.parametrize(
    ("batch", "settings", "seeds", "match"),
    [
        ([[5], [5] * 65], {}, [1, 2], "1 to max_seq_len=64 tokens, got 65"),
        ([[5], [5, 96]], {}, [1, 2], r"token ids must be in \[0, 96\), got 5 to 96"),
        ([[5], [-1]], {}, [1, 2], r"token ids must be in \[0, 96\), got -1 to -1"),
        ([[5], [6]], {}, [1, -2], r"seed must be in \[0, 2\*\*64\), got -2"),
        ([[5], [6]], {}, [1], r"seeds must have one entry per prompt \(2\), got 1"),
        ([[5], [6]], [{}], [1, 2], r"sampling must have one entry per prompt \(2\), got 1"),
        ([[5], [6]], {"stop_strings": [""]}, [1, 2], "stop_strings must be texts that are not empty"),
        ([[5], [6]], {"stop_strings": [3]}, [1, 2], "stop_strings must be texts that are not empty"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(batch, settings, seeds, match):
    engine = make()
    with pytest.raises(ValueError, match=match):
        engine.generate(batch, settings, seeds)
    params = SamplingParams(max_new_tokens=9)
    assert close(engine.generate([[7, 8]], params, [3])[0], make().generate([[7, 8]], params, [3])[0])
    assert not engine.busy


def test_a_failing_prefill_leaves_an_empty_engine(monkeypatch):
    engine, params = make(), SamplingParams(max_new_tokens=9)
    with monkeypatch.context() as patch:
        patch.setattr(engine._decoder, "_hidden", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([[5, 6], [7]], params, [1, 2])
    assert not engine.busy
    assert close(engine.generate([[7, 8]], params, [3])[0], make().generate([[7, 8]], params, [3])[0])


def test_rows_submitted_before_generate_are_handed_out_by_step():
    engine = make()
    ticket = engine.submit([5, 6], SamplingParams(max_new_tokens=2), 1)
    assert len(engine.generate([[7, 8]], SamplingParams(max_new_tokens=9), [3])[0].ids) == 9
    assert [one for one, _ in engine.step()] == [ticket]


def test_stop_ids_end_a_row_and_are_kept():
    engine = make()
    free = engine.generate([[5, 6]], SamplingParams(max_new_tokens=30, ignore_eos=True), [4])[0]
    stop = free.ids[9]
    first = free.ids.index(stop)
    cut = engine.generate([[5, 6]], SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,)), [4])[0]
    assert cut.ids == free.ids[: first + 1] and cut.finish_reason == "stop"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 500), st.integers(1, 4), st.integers(0, 20))
def test_stop_strings_end_a_row_at_the_token_that_completes_them(seed, length, at):
    engine = make()
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    free = engine.generate([[5, 6]], sampling, [seed])[0]
    text = engine.tokenizer.decode(free.ids)
    stop = text[at : at + length]
    cut = engine.generate(
        [[5, 6]], SamplingParams(max_new_tokens=30, ignore_eos=True, stop_strings=("\x00", stop)), [seed]
    )[0]
    end = text.index(stop) + length
    assert cut.ids == free.ids[:end] and cut.finish_reason == "stop"


def test_the_load_counts_rows_memory_and_the_time_in_the_queue():
    engine = make(max_batch=2, max_seq_len=10)
    for seed, prompt in enumerate(([3, 4], [3, 4, 5], [6])):
        engine.submit(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True), seed)
    assert (engine.load().running, engine.load().waiting, engine.load().kv_use) == (0, 3, 0.0)
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_use) == (2, 1, (3 + 4) / 20)
    assert load.queued_rows == 2 and load.queued_seconds > 0
    engine.interrupt()
    while engine.busy:
        engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_use, load.queued_rows) == (0, 0, 0.0, 3), "a parked row waited once"


def test_aborted_rows_leave_the_batch_and_no_output():
    engine = make(max_batch=2)
    tickets = [
        engine.submit(p, SamplingParams(max_new_tokens=20, ignore_eos=True), i) for i, p in enumerate(prompts(4))
    ]
    engine.step()
    engine.abort([tickets[0], tickets[3]])
    outputs = {}
    while engine.busy:
        outputs.update(engine.step())
    assert set(outputs) == {tickets[1], tickets[2]}
    assert close(
        outputs[tickets[1]],
        make().generate([prompts(4)[1]], SamplingParams(max_new_tokens=20, ignore_eos=True), [1])[0],
    )


def test_rows_with_batch_numbers_run_as_batches_of_their_own():
    engine = make(max_batch=8)
    sampling = SamplingParams(max_new_tokens=10, ignore_eos=True)
    tickets = {
        engine.submit([5 + index, 6], sampling, index, batch=batch): batch for batch in (1, 2) for index in range(3)
    }
    ended = []
    while engine.busy:
        ended += [tickets[ticket] for ticket, _ in engine.step()]
        assert engine.num_running <= 3
    assert ended == [1, 1, 1, 2, 2, 2]


def test_new_weights_are_served_with_their_version_and_bad_ones_change_nothing():
    engine = make(seed=0)
    sampling = SamplingParams(max_new_tokens=12)
    before = engine.generate([[5, 6, 7]], sampling, [1])[0]
    good = named(1)
    name = next(iter(good))
    bad = {
        "missing": {n: t for n, t in good.items() if n != name},
        "unknown other.weight": {**good, "other.weight": torch.zeros(1)},
        "must have shape": {**good, name: torch.zeros(3)},
    }
    for match, tensors in bad.items():
        with pytest.raises(DataError, match=match):
            engine.load_weights(iter(tensors.items()), 7)
        assert engine.version == 0 and engine.generate([[5, 6, 7]], sampling, [1])[0] == before
    with pytest.raises(DataError, match="repeated"):
        engine.load_weights([*good.items(), (name, good[name])], 7)
    engine.load_weights(iter(good.items()), 7)
    after = engine.generate([[5, 6, 7]], sampling, [1])[0]
    assert after.versions == [(0, len(after.ids), 7)] and after.logprobs != before.logprobs
    assert close(after, make(seed=1).generate([[5, 6, 7]], sampling, [1])[0])


@pytest.mark.parametrize("batch", [None, 1], ids=["any-batch", "own-batch"])
def test_interrupted_rows_continue_as_if_nothing_had_happened(batch):
    engine, sampling = make(max_batch=8 if batch else 4), SamplingParams(max_new_tokens=20)
    alone = [make().generate([p], sampling, [i])[0] for i, p in enumerate(prompts(6))]
    tickets = [engine.submit(p, sampling, i, batch=batch) for i, p in enumerate(prompts(6))]
    outputs, step = {}, 0
    while engine.busy:
        outputs.update(engine.step())
        step += 1
        if step % 5 == 0:
            engine.interrupt()
            assert engine.num_running == 0
    assert all(close(outputs[ticket], one) for ticket, one in zip(tickets, alone, strict=True))


def test_rows_interrupted_while_weights_change_keep_their_tokens_and_each_token_its_version():
    engine, sampling = make(seed=0), SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompt, old = [5, 6, 7], make(seed=0).generate([[5, 6, 7]], sampling, [1])[0]
    engine.submit(prompt, sampling, 1)
    for _ in range(4):
        engine.step()
    engine.interrupt()
    engine.interrupt()
    engine.load_weights(iter(named(1).items()), 7)
    (_, output), *_ = [ended for _ in range(9) for ended in engine.step()]
    assert output.versions == [(0, 4, 0), (4, 12, 7)]
    assert output.ids[:4] == old.ids[:4] and output.logprobs[:4] == old.logprobs[:4]
    rest = SamplingParams(max_new_tokens=8, ignore_eos=True)
    fresh = make(seed=1).generate([[*prompt, *output.ids[:4]]], rest, [1])[0]
    assert output.ids[4:] == fresh.ids and output.logprobs[4:] == pytest.approx(fresh.logprobs, abs=1e-5)


def test_a_tied_output_layer_may_come_along():
    engine = make()
    tensors = named(1)
    engine.load_weights([*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])], 1)
    assert engine.version == 1


def test_weights_cannot_change_under_running_rows():
    engine = make()
    engine.submit([5], SamplingParams(max_new_tokens=20, ignore_eos=True), 1)
    engine.step()
    with pytest.raises(RolloutConfigError, match="while 1 rows run"):
        engine.load_weights(named(1).items(), 1)


@pytest.mark.parametrize(
    "raw",
    [
        RAW,
        {**RAW, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {**RAW, "model_type": "qwen2"},
    ],
    ids=["qwen3", "llama", "qwen2"],
)
def test_weights_are_read_back_as_they_were_written(raw):
    weights = DecoderWeights(DecoderConfig.from_dict(raw))
    tensors = {n: torch.randn(s) for n, s in weights.names_and_shapes().items()}
    weights.load(tensors.items())
    assert all(tensor.equal(tensors[name]) for name, tensor in weights.named_tensors())
    for name, place in weights.destinations().items():
        assert place.equal(tensors[name]) and place.is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_accelerators_attends_as_written_out(masked):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 2, length, 8, generator=generator) for length in (4, 5, 5))
    bias = torch.randn(3, 2, 1, 5, generator=generator) if masked else None
    scores = query @ key.transpose(2, 3) + (0.0 if bias is None else bias)
    expected = (scores.softmax(-1) @ value).reshape(3, 2 * 4 * 8)
    assert torch.allclose(fused_attention(query, key, value, bias), expected, atol=1e-5)


@given(st.integers(1, 4), st.sampled_from([2, 4, 8]))
def test_interleaving_is_undone_exactly(heads, dim):
    rows = torch.arange(heads * dim * 3).view(heads * dim, 3)
    assert deinterleave(interleave(rows, dim), dim).equal(rows)
    assert deinterleave(interleave(rows[:, 0], dim), dim).equal(rows[:, 0])


def test_a_bad_number_in_one_row_does_not_reach_rows_that_come_later():
    engine = make(max_batch=2)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    good = engine.generate([[5, 6]], sampling, [1])[0]
    with torch.inference_mode():
        engine._decoder._cache.data.fill_(float("nan"))
    assert close(engine.generate([[5, 6]], sampling, [1])[0], good)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type must be one of"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_what_the_lean_forward_cannot_run_is_refused(changes, match):
    with pytest.raises(RolloutConfigError, match=match):
        DecoderConfig.from_dict({**RAW, **changes})


class Model:
    """Rows of the cache by brute force: a list of (row, position) marks per row."""

    def __init__(self):
        self.rows = []

    def check(self, cache):
        assert cache.rows == len(self.rows)
        for index, marks in enumerate(self.rows):
            start = int(cache.starts[index])
            assert cache.end - start == len(marks)
            stored = cache.data[0, 0, index, 0, start : cache.end, 0]
            assert stored.tolist() == marks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cache_keeps_every_row_through_joins_ends_and_moves(data):
    limit = data.draw(st.integers(8, 200))
    cache = KVCache(1, 1, 1, dtype=torch.float32, device=torch.device("cpu"), max_columns=limit)
    model, mark = Model(), iter(range(1, 10**9))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "remove"]))
        if action == "add" or not model.rows:
            lengths = data.draw(st.lists(st.integers(1, limit - 1), min_size=1, max_size=3))
            padded = max(lengths)
            stored = cache.add_rows(np.array(lengths), padded)[0]
            for index, length in enumerate(lengths):
                marks = [float(next(mark)) for _ in range(length)]
                stored[0, index, 0, padded - length :, 0] = torch.tensor(marks)
                model.rows.append(marks)
        elif action == "step":
            for _ in range(data.draw(st.integers(1, 40))):
                if not model.rows or max(map(len, model.rows)) >= limit:
                    break
                cache.begin_step()
                values = [float(next(mark)) for _ in model.rows]
                cache.column()[0][0, :, 0, 0] = torch.tensor(values)
                assert cache.positions().tolist() == [len(marks) for marks in model.rows]
                for marks, value in zip(model.rows, values, strict=True):
                    marks.append(value)
                mask, window = cache.mask(), cache.window()[0]
                for index, marks in enumerate(model.rows):
                    seen = window[0, index, 0, :, 0]
                    visible = seen if mask is None else seen[mask[index, 0] == 0]
                    assert visible.tolist() == marks
                cache.advance()
        else:
            gone = sorted(data.draw(st.sets(st.integers(0, len(model.rows) - 1), min_size=1)))
            left = len(model.rows) - len(gone)
            holes = [g for g in gone if g < left]
            sources = [r for r in range(left, len(model.rows)) if r not in gone]
            cache.keep(left, list(zip(sources, holes, strict=True)))
            for source, hole in zip(sources, holes, strict=True):
                model.rows[hole] = model.rows[source]
            del model.rows[left:]
        model.check(cache)
    assert cache.data.shape[4] <= limit + 64


def test_a_float32_head_gives_the_logits_that_bfloat16_rounds():
    weights = DecoderWeights(DecoderConfig.from_dict(RAW), dtype=torch.bfloat16)
    weights.load(named().items())
    rows = prompts(3)
    found = [
        LeanDecoder(weights, max_seq_len=64, float32_head=float32).prefill(rows, np.arange(3))
        for float32 in (True, False)
    ]
    assert all(logits.dtype == torch.float32 for logits in found)
    assert not torch.equal(found[0], found[1])
    # Sums of the same products: they round to the same number of 8 bits, or to its neighbour where they lie between two.
    torch.testing.assert_close(found[1], found[0], rtol=2**-8, atol=1e-6)
