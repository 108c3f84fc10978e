"""Generation with Hugging Face models over a static KV cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rollouts.hf.engine import HFEngine
    from rl_core.rollouts.hf.generation import HFGeneration
    from rl_core.rollouts.hf.worker import HFRolloutWorker
    from rl_core.rollouts.padding import GenerationOutput

__all__ = ["GenerationOutput", "HFEngine", "HFGeneration", "HFRolloutWorker"]
_HOMES = {
    "GenerationOutput": "running",
    "HFEngine": "engine",
    "HFGeneration": "generation",
    "HFRolloutWorker": "worker",
}


def __getattr__(name: str) -> Any:
    """Import public names at first use: each pulls in torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
