"""Packed attention equals attention over each row alone, in values and gradients, whatever the lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.actors.attention import PackedLayout, packed_attention
from rl_core.actors.cpu.linear import OneDnnLinear, use_onednn


def row_attention(query, key, value, window):
    """Return causal attention of one row [A, T, D], written out in float64."""
    repeats, length = query.shape[0] // key.shape[0], query.shape[1]
    key, value = (states.double().repeat_interleave(repeats, 0) for states in (key, value))
    scores = query.double() @ key.transpose(1, 2) * 0.3
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance >= (window or length))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


def packed_of(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedLayout(offsets, lengths)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=8),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 40]),
)
def test_packed_rows_do_not_see_each_other(lengths, key_heads, window):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, 8, generator=generator).requires_grad_() for heads in (4, key_heads, key_heads)
    )
    layout = packed_of(lengths)
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
    runs = packed_of(lengths).runs
    assert [run.start for run in runs] == [sum(r.tokens for r in runs[:i]) for i in range(len(runs))]
    assert sum(run.tokens for run in runs) == sum(lengths)
    assert sum(run.rows for run in runs) == len(lengths)
    assert all(run.rows * run.width <= 1.25 * run.tokens for run in runs)


def test_equal_lengths_are_one_run_without_copies():
    (run,) = packed_of([7] * 5).runs
    assert run.dense is None and run.real is None and (run.rows, run.width) == (5, 7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
def test_onednn_linear_has_the_values_and_gradients_of_a_linear_layer(bias, shape):
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 6, bias=bias)
    fast = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=bias))
    fast[0].load_state_dict(plain.state_dict())
    assert use_onednn(fast) == 1 and isinstance(fast[0], OneDnnLinear)
    inputs = torch.randn(shape)
    exact = plain.double()
    left, right = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    weight = torch.randn(*shape[:-1], 6)
    ours, theirs = fast(left), exact(right)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert torch.allclose(ours.double(), theirs, atol=1e-5)
    assert torch.allclose(left.grad.double(), right.grad, atol=1e-5)
    for got, wanted in zip(fast.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(got.grad.double(), wanted.grad, atol=1e-5)


def test_onednn_leaves_half_precision_to_torch():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16())
    use_onednn(layer)
    assert layer(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_onednn_gives_no_gradient_where_none_is_wanted():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    use_onednn(layer)
    layer[0].weight.requires_grad_(False)
    inputs = torch.randn(3, 4, requires_grad=True)
    layer(inputs).sum().backward()
    assert layer[0].weight.grad is None and layer[0].bias.grad is not None and inputs.grad is not None
