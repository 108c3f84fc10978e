"""The door to this room for a process that trains."""

from torch import nn

from rl_core.cpu.linear import use_onednn
from rl_core.cpu.machine import prefers_onednn
from rl_core.cpu.memory import keep_freed_memory


def tune(model: nn.Module) -> None:
    """Make a model quick on this machine's CPU, in place, before it is wrapped; and the process that trains it."""
    keep_freed_memory()
    if prefers_onednn():
        use_onednn(model)
