"""Reinforcement learning arithmetic as pure functions over tensors: advantages, losses, KL, aggregation, rewards and filters.

The names below are what an estimator or loss of a user needs (docs/writing-an-estimator.md). Each is imported from its module when it
is first used, so that processes without torch (environments, the runner) can import `registry` and `rewards`.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "AdvantageInputs": "advantages.types",
    "AdvantageResult": "advantages.types",
    "LossInputs": "losses.types",
    "LossResult": "losses.types",
    "aggregate": "aggregation",
    "compute_advantages": "advantages.compute",
    "compute_policy_loss": "losses.compute",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import the module that defines `name`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
