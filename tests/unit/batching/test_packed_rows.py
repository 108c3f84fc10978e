"""Packed rows: a round trip keeps every real token, padding carries nothing, gradients go through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batching.packing import pack_rows, pack_values, unpack_rows


def test_layout_of_a_small_pack():
    ids = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]])
    packed = pack_rows(ids, [3, 1, 4], rows=[2, 0], multiple=2)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 3, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.cu_seqlens.tolist() == [0, 4, 8] and packed.cu_seqlens.dtype == torch.int32
    assert packed.lengths.tolist() == [4, 3] and packed.padded_lengths == [4, 4]
    assert packed.max_length == 4 and packed.rows == [2, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), height=st.integers(1, 6), width=st.integers(1, 8), multiple=st.integers(1, 4))
def test_round_trip_keeps_real_tokens_and_zeroes_the_rest(data, height, width, multiple):
    lengths = data.draw(st.lists(st.integers(1, width), min_size=height, max_size=height))
    rows = data.draw(st.permutations(range(height)))[: data.draw(st.integers(1, height))]
    ids = torch.arange(1, height * width + 1).reshape(height, width)
    packed = pack_rows(ids, torch.tensor(lengths), rows=rows, multiple=multiple)
    values = torch.rand(height, width, 3, dtype=torch.float64)
    again = unpack_rows(pack_values(values, packed), packed, width=width + 2)
    real = torch.arange(width + 2) < torch.tensor(lengths)[list(rows), None]
    assert again.shape == (len(rows), width + 2, 3)
    assert torch.equal(again[:, :width][real[:, :width]], values[list(rows)][real[:, :width]])
    assert not again[~real].any()
    assert (packed.cu_seqlens.diff()[: len(rows)] % multiple == 0).all()
    assert torch.equal(
        unpack_rows(packed.input_ids, packed, width=width), torch.where(real[:, :width], ids[list(rows)], 0)
    )


def test_packing_and_unpacking_are_differentiable():
    ids = torch.zeros(3, 4, dtype=torch.int64)
    packed = pack_rows(ids, [2, 4, 1], rows=[2, 0, 1], multiple=3)
    values = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack_rows(pack_values(x, packed), packed, width=4), [values])


def test_nan_on_padding_reaches_neither_values_nor_gradients():
    packed = pack_rows(torch.ones(2, 4, dtype=torch.int64), [2, 3], multiple=4)
    flat = torch.ones(1, 8, requires_grad=True)
    poisoned = torch.where(torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1]]).bool(), float("nan"), flat)
    rows = unpack_rows(poisoned, packed, width=4)
    rows.sum().backward()
    assert rows.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert flat.grad.tolist() == [[1, 1, 0, 0, 1, 1, 1, 0]]


def test_packed_values_keep_their_type():
    packed = pack_rows(torch.ones(1, 2, dtype=torch.int64), [2], multiple=4)
    assert pack_values(torch.tensor([[True, True]]), packed).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lengths": [2, 5]}, r"lengths\[1\] must be in \[1, width 4\], got 5"),
        ({"lengths": [0, 2]}, r"lengths\[0\]"),
        ({"lengths": [2]}, "one entry per row"),
        ({"lengths": [2, 2], "rows": [2]}, r"rows must be in \[0, 1\], got 2"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        pack_rows(torch.ones(2, 4, dtype=torch.int64), **arguments)


def test_other_shapes_than_the_packed_ones_are_refused():
    packed = pack_rows(torch.ones(2, 4, dtype=torch.int64), [2, 3])
    with pytest.raises(ValueError, match=r"\(2, 4\), got \(2, 5\)"):
        pack_values(torch.ones(2, 5), packed)
    with pytest.raises(ValueError, match=r"\(1, 5, ...\), got \(1, 6\)"):
        unpack_rows(torch.ones(1, 6), packed, width=4)
    with pytest.raises(ValueError, match="3 tokens, got 2"):
        unpack_rows(torch.ones(1, 5), packed, width=2)
