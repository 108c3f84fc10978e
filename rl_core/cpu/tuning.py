"""Applies the CPU optimizations to a process that trains."""

from torch import nn

from rl_core.cpu.linear import use_onednn
from rl_core.cpu.machine import prefers_onednn
from rl_core.cpu.memory import keep_freed_memory


def tune(model: nn.Module, *, compiled: bool = False) -> None:
    """Apply the CPU optimizations to `model` in place and to this process. Must be called before the model is wrapped.

    The linear layers of a model whose layers will be `compiled` stay torch's own, which torch.compile knows.
    """
    keep_freed_memory()
    if prefers_onednn() and not compiled:
        use_onednn(model)
