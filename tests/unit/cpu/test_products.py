"""The generating forward's products: whichever library computes them, and rows padded to few sizes for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.cpu import products
from rl_core.cpu.products import add_linear, linear, padded_rows


@given(st.integers(1, 5000))
def test_padded_sizes_are_few_and_near(rows):
    size = padded_rows(rows)
    assert rows <= size <= max(rows + 7, 1.25 * rows)
    assert padded_rows(size) == size
    assert len({padded_rows(n) for n in range(1, 257)}) == 16


@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("rows", [3, 200], ids=["small", "large enough for oneDNN"])
def test_products_agree_with_torch(rows, onednn, monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: onednn)
    x, weight, bias, hidden = torch.randn(rows, 96), torch.randn(128, 96), torch.randn(128), torch.randn(rows, 128)
    exact = x.double() @ weight.double().T
    assert (linear(x, weight, bias) - (exact + bias)).abs().max() < 1e-4
    assert (add_linear(hidden, x, weight) - (exact + hidden)).abs().max() < 1e-4
