"""Generation with the real `sglang.Engine`, in a child process of the worker.

worker process                                   child process (python -m rl_core.rollouts.sglang.child)
  SGLangEngine --rows and calls, by socket-->      EngineServer -> sglang.Engine -> its scheduler and detokenizer processes
  SGLangWeightTarget --tensors, by memory-->       WeightLoader -> the model's tensors, whose checksums the worker compares
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rollouts.sglang.engine import SGLangEngine
    from rl_core.rollouts.sglang.worker import SGLangWorker

__all__ = ["SGLangEngine", "SGLangWorker"]
_MODULES = {"SGLangEngine": "engine", "SGLangWorker": "worker"}


def __getattr__(name: str) -> Any:
    """Import public names at first use: each imports torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
