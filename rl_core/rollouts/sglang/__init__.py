"""Generation with the real `sglang.Engine`, in a child process of the worker.

worker process                                 child process (python -m rl_core.rollouts.sglang.child)
  generation -> SGLangEngine --rows, calls-->    Server -> sglang.Engine -> its scheduler and detokenizer processes
  EngineTarget --weights in shared memory-->     Loader -> the model's tensors, checked in the engine's memory
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rollouts.sglang.engine import SGLangEngine
    from rl_core.rollouts.sglang.generation import SGLangGeneration
    from rl_core.rollouts.sglang.worker import SGLangWorker

__all__ = ["SGLangEngine", "SGLangGeneration", "SGLangWorker"]
_HOMES = {"SGLangEngine": "engine", "SGLangGeneration": "generation", "SGLangWorker": "worker"}


def __getattr__(name: str) -> Any:
    """Import public names at first use: each pulls in torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
