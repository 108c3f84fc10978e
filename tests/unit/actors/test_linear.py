"""Memory of oneDNN products whose shape is new at every step, in processes of their own: the caches are the process's."""

import os
import subprocess
import sys

from rl_core.actors.cpu.linear import CACHES

SCRIPT = """
import torch
from rl_core.actors.cpu.linear import use_onednn

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
    """Return the memory, MiB, that 60 new shapes add."""
    kept = {name: value for name, value in os.environ.items() if name not in CACHES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=kept | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_new_number_of_tokens_at_every_step_does_not_fill_the_memory():
    unbounded = growth(**dict.fromkeys(CACHES, "1024"))
    assert growth() < unbounded / 2
