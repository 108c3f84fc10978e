"""Rollouts whose episodes run on NeMo-Gym servers: `AsyncNemoGymRolloutImpl` runs groups, `NemoGymEnvironment` is the HTTP client."""

from rl_core.rollouts.nemo_gym.answers import GymProtocolFailure, RowFailure
from rl_core.rollouts.nemo_gym.environment import NemoGymEnvironment
from rl_core.rollouts.nemo_gym.implementation import AsyncNemoGymRolloutImpl

__all__ = ["AsyncNemoGymRolloutImpl", "GymProtocolFailure", "NemoGymEnvironment", "RowFailure"]
