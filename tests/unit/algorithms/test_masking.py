"""`zero_outside` against `torch.where`: values and gradients, with masks that are true everywhere, somewhere and nowhere."""

import pytest
import torch

from rl_core.algorithms.masking import zero_outside


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_where(share, dtype):
    torch.manual_seed(0)
    mask = torch.rand(5, 4) < share
    given = torch.where(mask, torch.randn(5, 4), torch.nan).to(dtype)
    results = []
    for function in (zero_outside, lambda mask, values: torch.where(mask, values, 0.0)):
        values = given.clone().requires_grad_()
        result = function(mask, values)
        (result * torch.arange(20.0).reshape(5, 4)).sum().backward()
        results.append((result.detach(), values.grad))
    (mine, gradient), (expected, of_where) = results
    assert mine.dtype == dtype
    assert torch.equal(mine, expected)
    assert torch.equal(gradient, of_where)


def test_a_mask_of_rows_broadcasts():
    values, mask = torch.ones(2, 3, 4), torch.tensor([[[True], [False], [True]], [[True], [True], [True]]])
    assert torch.equal(zero_outside(mask, values), torch.where(mask, values, 0.0))
