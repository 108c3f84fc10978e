"""`spec.algorithm.critic`: settings of the value function."""

from pydantic import Field

from rl_core.api.base import Spec


class CriticSpec(Spec):
    """The value function of gae. Its learning rate is actor.optimizer.valueLearningRate, its warm-up actor.criticWarmupSteps."""

    separate: bool = False
    """true: a second model, initialized from model.path; false: a value head on the policy."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per trainable token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE: the decay of later temporal differences."""
    value_clip: float | None = Field(None, gt=0)
    """Value clipping (PPO): largest change of a value in a step that reduces the loss; null = off."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the value loss."""
