"""Applies the CPU optimizations to a process that trains."""

from torch import nn

from rl_core.cpu.linear import use_onednn
from rl_core.cpu.machine import prefers_onednn
from rl_core.cpu.memory import keep_freed_memory


def tune(model: nn.Module) -> None:
    """Apply the CPU optimizations to `model` in place and to this process. Must be called before the model is wrapped."""
    keep_freed_memory()
    if prefers_onednn():
        use_onednn(model)
