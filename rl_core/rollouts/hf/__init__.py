"""Generation with Hugging Face models over a static KV cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rollouts.hf.engine import HFEngine
    from rl_core.rollouts.hf.worker import HFRolloutWorker
    from rl_core.rollouts.multi_step import MultiStepRolloutWorker

__all__ = ["HFEngine", "HFRolloutWorker", "MultiStepRolloutWorker"]
_MODULES = {"HFEngine": "hf.engine", "HFRolloutWorker": "hf.worker", "MultiStepRolloutWorker": "multi_step"}


def __getattr__(name: str) -> Any:
    """Import public names at first use: each imports torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rl_core.rollouts.{_MODULES[name]}"), name)
