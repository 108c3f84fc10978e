"""oneDNN's linear layers: values and gradients of torch's, and level memory when each step has another shape."""

import os
import subprocess
import sys

import pytest
import torch

from rl_core.cpu.linear import CACHES, OneDnnLinear, use_onednn

SCRIPT = """
import torch
from rl_core.cpu.linear import use_onednn

torch.set_num_threads(1)
layer = torch.nn.Sequential(torch.nn.Linear(128, 512))
use_onednn(layer)
gradient = torch.randn(9000, 512)

def step(tokens):
    layer(torch.randn(tokens, 128, requires_grad=True)).backward(gradient[:tokens])

def mebibytes():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

step(9000)
before = mebibytes()
for index in range(60):
    step(8999 - 7 * index)
print(mebibytes() - before)
"""


def growth(**environment):
    """Return the memory, MiB, that 60 new shapes add to a process of its own: the caches are the process's."""
    kept = {name: value for name, value in os.environ.items() if name not in CACHES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=kept | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_new_number_of_tokens_at_every_step_does_not_fill_the_memory():
    unbounded = growth(**dict.fromkeys(CACHES, "1024"))
    assert growth() < unbounded / 2


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
