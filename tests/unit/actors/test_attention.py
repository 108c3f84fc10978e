"""Packed attention equals attention over each row alone, in values and gradients, whatever the lengths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.actors.attention import PackedLayout, needs_enable_gqa, packed_attention


def row_attention(query, key, value, window):
    """Return causal attention of one row [A, T, D], written out in float64."""
    repeats, length = query.shape[0] // key.shape[0], query.shape[1]
    key, value = (states.double().repeat_interleave(repeats, 0) for states in (key, value))
    scores = query.double() @ key.transpose(1, 2) * 0.3
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance >= (window or length))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


def packed_of(lengths, **options):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedLayout(offsets, lengths, **options)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=8),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 40]),
    kernel=st.sampled_from(["auto", "sdpa", "eager"]),
)
def test_packed_rows_do_not_see_each_other(lengths, key_heads, window, kernel):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, 8, generator=generator).requires_grad_() for heads in (4, key_heads, key_heads)
    )
    layout = packed_of(lengths, kernel=kernel)
    output, _ = packed_attention(None, query, key, value, None, packed=layout, scaling=0.3, sliding_window=window)
    assert output.shape == (1, total, 4, 8)
    weight = torch.randn(output.shape, generator=generator)
    ours = torch.autograd.grad((output * weight).sum(), (query, key, value))
    rows = []
    for start, length in zip(layout.cu_seqlens.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        rows.append(row_attention(query[0, :, part], key[0, :, part], value[0, :, part], window).transpose(0, 1))
    expected = torch.cat(rows)[None]
    theirs = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    assert torch.allclose(output.double(), expected, atol=1e-5)
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_runs_cover_every_token_once_with_little_padding(lengths):
    runs = packed_of(lengths).dense_batches
    assert [run.start for run in runs] == [sum(r.tokens for r in runs[:i]) for i in range(len(runs))]
    assert sum(run.tokens for run in runs) == sum(lengths)
    assert sum(run.rows for run in runs) == len(lengths)
    assert all(run.rows * run.width <= 1.25 * run.tokens for run in runs)


def test_equal_lengths_are_one_run_without_copies():
    (run,) = packed_of([7] * 5).dense_batches
    assert run.dense is None and run.real is None and (run.rows, run.width) == (5, 7)


def test_torch_is_told_of_grouped_heads_only_where_it_asks():
    from torch.nn.attention.varlen import varlen_attn

    def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)): ...

    assert needs_enable_gqa(varlen_attn) and not needs_enable_gqa(of_torch_2_11)
