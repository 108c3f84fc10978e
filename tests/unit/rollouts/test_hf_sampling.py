"""Noise by counter, and the draw against brute force in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import SequenceBiasLogitsProcessor

from rl_core.api.errors import RolloutConfigError
from rl_core.api.job import RLJobSpec
from rl_core.rollouts.groups import training_params
from rl_core.rollouts.hf import running
from rl_core.rollouts.hf.running import Request, Rows
from rl_core.rollouts.hf.sampling import BatchSampler, uniforms
from rl_core.rollouts.sampling import SamplingParams

CPU = torch.device("cpu")


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def grid(seeds, positions):
    return uniforms(np.asarray(seeds, dtype=np.uint64)[:, None], np.asarray(positions)[None, :])


def test_noise_is_uniform_over_positions_and_over_seeds():
    # 64 bins, 63 degrees of freedom: 120 is far beyond the 1 - 1e-5 quantile (about 117).
    for values in (
        grid([12345], range(200_000)),
        grid(range(200_000), [17]),
        grid([2**62 + i for i in range(2000)], range(100)),
    ):
        flat = values.ravel().astype(np.float64)
        assert flat.min() >= 0 and flat.max() < 1
        counts = np.histogram(flat, bins=64, range=(0, 1))[0]
        assert chi_square(counts, len(flat) / 64) < 120
        assert abs(flat.mean() - 0.5) < 5 / math.sqrt(12 * len(flat))


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    values = grid(range(400), range(400)).astype(np.float64) - 0.5
    limit = 5 / (12 * math.sqrt(values.size))
    for one, other in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[1:, 1:], values[:-1, :-1])):
        assert abs((one * other).mean()) < limit
    pairs = np.histogram2d(values[1:].ravel(), values[:-1].ravel(), bins=8, range=[[-0.5, 0.5]] * 2)[0]
    assert chi_square(pairs, pairs.sum() / 64) < 120


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8), st.integers(0, 10_000))
def test_noise_depends_on_seed_and_position_alone(seeds, position):
    together = uniforms(np.array(seeds, dtype=np.uint64), np.full(len(seeds), position))
    for seed, value in zip(seeds, together, strict=True):
        assert uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0] == value


def splitmix(state):
    """SplitMix64 of the paper in whole numbers; splitmix(0) = 0xE220A8397B1DCDAF is its published first output."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_noise_is_splitmix_of_the_mixed_seed_at_the_position(seed, position):
    assert splitmix(0) == 0xE220A8397B1DCDAF
    state = (splitmix(seed) + position * 0x9E3779B97F4A7C15) % 2**64
    assert grid([seed], [position])[0, 0] == (splitmix(state) >> 11) / 2**53


def draw(logits, noise, **params):
    rows = [SamplingParams(**params)] * len(logits)
    return BatchSampler(rows, [[]] * len(rows), vocab_size=logits.shape[1], device=CPU)(logits, noise)


def reference(logits, *, temperature=1.0, top_k=None, top_p=1.0):
    """Probabilities in float64 after temperature, then top-k, then top-p."""
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[:top_k] if top_k else order
    mass = p[kept] / p[kept].sum()
    before = np.cumsum(mass) - mass
    kept = kept[before < top_p - 1e-12] if top_p < 1 else kept
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_of_float64(params):
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    count = 60_000
    noise = torch.from_numpy(grid([7], range(count)).ravel().copy())
    tokens, _ = draw(logits.expand(count, -1).contiguous(), noise, **params)
    expected = reference(logits[0].double().numpy(), **params) * count
    counts = np.bincount(tokens.numpy(), minlength=12)
    assert not counts[expected == 0].any()
    live = expected > 0
    assert chi_square(counts[live], expected[live]) < 45


def test_tokens_of_very_small_mass_are_drawn_as_often_as_they_are_likely():
    """One token of half the mass, 150,000 that share the rest: in float32 most of these add nothing to the sum before them."""
    mass = 0.5 / 150_000 * 1e-3  # of each of the last 50,000
    p = torch.full((150_001,), (0.5 - 50_000 * mass) / 100_000)
    p[0], p[-50_000:] = 0.5, mass
    wanted = 50_000 * mass
    noise = 1 - wanted * (1 - (torch.arange(200, dtype=torch.float64) + 0.5) / 200)
    tokens = torch.cat([draw(p.log()[None], part[None])[0] for part in noise])
    assert (tokens >= 100_001).double().mean() > 0.95 and tokens.unique().numel() > 190


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([None, 1, 4]), st.sampled_from([1.0, 0.6])
)
def test_log_probabilities_are_of_the_whole_vocabulary_whatever_is_cut(seed, temperature, top_k, top_p):
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(seed)) * 3
    tokens, logprobs = draw(
        logits, torch.rand(6, dtype=torch.float64), temperature=temperature, top_k=top_k, top_p=top_p
    )
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("changes", [{}, {"top_k": 7}, {"top_p": 0.8}], ids=str)
def test_min_p_excludes_what_transformers_excludes(changes):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    scores = (logits / 0.7).clone()
    if changes.get("top_k"):
        scores = TopKLogitsWarper(changes["top_k"])(None, scores)
    if changes.get("top_p"):
        scores = TopPLogitsWarper(changes["top_p"])(None, scores)
    kept = MinPLogitsWarper(0.1)(None, scores).isfinite()[0]
    assert 1 < kept.sum() < scores.isfinite().sum()
    noise = torch.from_numpy(grid([5], range(20_000)).ravel().copy())
    tokens, logprobs = draw(logits.expand(20_000, -1).contiguous(), noise, temperature=0.7, min_p=0.1, **changes)
    assert set(tokens.tolist()) == set(kept.nonzero().flatten().tolist())
    exact = (logits.double() / 0.7).log_softmax(-1)[0, tokens]
    assert (logprobs.double() - exact).abs().max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=3, max_size=3),
    st.floats(0.5, 2.0),
    st.lists(st.floats(-2, 2), min_size=2, max_size=2),
)
def test_penalties_and_bias_change_logits_as_transformers_and_as_the_definition_of_openai_do(ids, factor, additive):
    presence, frequency = additive
    bias = ((3, -100.0), (4, 1.5))
    settings_ = {"repetition_penalty": factor, "presence_penalty": presence, "frequency_penalty": frequency}
    rows = [SamplingParams(temperature=0.5, **settings_, logit_bias=bias), SamplingParams(temperature=0.5)]
    rows.append(SamplingParams(temperature=0.5, repetition_penalty=factor))
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(len(ids[0])))
    sampler = BatchSampler(rows, ids, vocab_size=10, device=CPU)
    generated = [list(row) for row in ids]
    for _ in range(3):  # tokens that are drawn count at the next step
        tokens, logprobs = sampler(logits, torch.rand(3, dtype=torch.float64))
        for row, (params, before) in enumerate(zip(rows, generated, strict=True)):
            scores = logits[row : row + 1].double().clone()
            for token in set(before):
                scores[0, token] -= params.presence_penalty + params.frequency_penalty * before.count(token)
            if before and params.repetition_penalty != 1:
                scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([before]), scores)
            if params.logit_bias:
                added = {(token,): value for token, value in params.logit_bias}
                scores = SequenceBiasLogitsProcessor(added)(torch.zeros(1, 1, dtype=torch.int64), scores)
            exact = (scores / 0.5).log_softmax(-1)[0, tokens[row]]
            assert abs(logprobs[row].double() - exact) < 1e-4
            before.append(int(tokens[row]))
    assert 3 not in generated[0][len(ids[0]) :]


def test_settings_without_bias_are_those_that_the_trainer_scores_with():
    params = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1.0, frequency_penalty=1.0)
    params = replace(params, repetition_penalty=1.2, logit_bias=((1, 2.0),), stop_strings=("x",))
    assert params.unbiased() == SamplingParams(temperature=0.7, stop_strings=("x",))
    assert params.for_row((), None, greedy=True) == SamplingParams(temperature=0.0, stop_strings=("x",))


def test_greedy_takes_the_likeliest_token_with_its_probability_at_temperature_one():
    logits = torch.randn(5, 20)
    tokens, logprobs = draw(logits, torch.rand(5, dtype=torch.float64), temperature=0.0)
    assert tokens.equal(logits.argmax(-1))
    assert (logprobs - logits.log_softmax(-1).max(-1).values).abs().max() < 1e-6


def test_rows_of_different_settings_share_a_draw():
    logits, noise = torch.randn(4, 20), torch.rand(4, dtype=torch.float64)
    rows = [
        SamplingParams(temperature=t, top_k=k, top_p=p)
        for t, k, p in ((0.0, None, 1.0), (1.0, None, 1.0), (0.5, 2, 1.0), (2.0, None, 0.5))
    ]
    tokens, logprobs = BatchSampler(rows, [[]] * 4, vocab_size=20, device=CPU)(logits, noise)
    for index, row in enumerate(rows):
        token, logprob = BatchSampler([row], [[]], vocab_size=20, device=CPU)(
            logits[index : index + 1], noise[index : index + 1]
        )
        assert token.item() == tokens[index].item() and abs(logprob.item() - logprobs[index].item()) < 1e-6


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_tokens_of_no_probability_are_never_taken(noise):
    logits = torch.full((1, 50), -1e9)
    logits[0, 20:30] = 0.0
    tokens, _ = draw(logits, torch.tensor([noise], dtype=torch.float64))
    assert 20 <= tokens.item() < 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("max_new_tokens", -1),
        ("min_p", 1.1),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(RolloutConfigError, match=f"{field} must be"):
        SamplingParams(**{field: value})


def test_settings_are_taken_from_the_job_and_from_mappings_and_unknown_ones_are_refused():
    assert SamplingParams.of(
        {"max_new_tokens": 3, "stop_strings": ["a", "a", "b"], "stop_token_ids": [5, 5]}
    ) == SamplingParams(max_new_tokens=3, stop_strings=("a", "b"), stop_token_ids=(5,))
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"sampling": {"temperature": 0.5, "stop": ["x"], "maxNewTokens": 9}},
        }
    )
    assert training_params(spec) == SamplingParams(temperature=0.5, stop_strings=("x",), max_new_tokens=9)


def test_a_row_adds_stop_strings_and_may_change_its_length_and_decode_greedily():
    base = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=3, stop_strings=("a",))
    assert base.for_row(("a", "b"), None, False) == replace(base, stop_strings=("a", "b"))
    assert base.for_row((), 2, True) == SamplingParams(max_new_tokens=2, temperature=0.0, stop_strings=("a",))


def test_unknown_settings_are_refused():
    with pytest.raises(RolloutConfigError, match="length_penalty"):
        SamplingParams.of({"length_penalty": 1.1})


def test_a_random_number_just_below_1_chooses_no_token_without_weight(monkeypatch):
    """As float32 it would be 1, and the last token would be chosen whatever its weight is."""
    monkeypatch.setattr(running, "uniforms", lambda seeds, positions: np.full(positions.shape, 1 - 2.0**-53))
    rows, params = Rows(2), SamplingParams(top_k=2)
    requests = [
        Request(ticket=n, prompt=(1,), params=params, seed=n, limit=3, limit_reason="length", stop_set=0)
        for n in (0, 1)
    ]
    rows.add(requests)
    noise = torch.from_numpy(rows.uniforms(0))
    sampler = BatchSampler([params] * 2, [[], []], vocab_size=4, device=torch.device("cpu"))
    tokens, _ = sampler(torch.tensor([[3.0, 2.0, 1.0, -5.0]] * 2), noise)
    assert tokens.tolist() == [1, 1]
