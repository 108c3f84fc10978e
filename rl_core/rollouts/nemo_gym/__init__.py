"""Rollouts whose episodes run on NeMo-Gym servers: `AsyncNemoGymRolloutImpl` runs groups, `NemoGymEnvironment` is the HTTP client.

The client is imported at first use, because jobs without these servers need no HTTP library.
"""

from typing import TYPE_CHECKING, Any

from rl_core.nemo_gym.answers import GymProtocolFailure, RowFailure
from rl_core.rollouts.nemo_gym.implementation import AsyncNemoGymRolloutImpl

if TYPE_CHECKING:
    from rl_core.nemo_gym.client import NemoGymEnvironment

__all__ = ["AsyncNemoGymRolloutImpl", "GymProtocolFailure", "NemoGymEnvironment", "RowFailure"]


def __getattr__(name: str) -> Any:
    if name != "NemoGymEnvironment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_core.nemo_gym.client import NemoGymEnvironment

    return NemoGymEnvironment
