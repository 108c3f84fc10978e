"""`spec.algorithm.critic`: who says what a token's future is worth, and how it learns."""

from pydantic import Field

from rl_core.api.base import Spec


class CriticSpec(Spec):
    """The critic of gae. Learning rate and warm-up: actor.optimizer.valueLearningRate, actor.criticWarmupSteps."""

    separate: bool = False
    """True: a second model of its own, from model.path too; false: a value head on the policy."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per trainable token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Decay of later temporal differences."""
    value_clip: float | None = Field(None, gt=0)
    """A value moves at most so far from that before the step without paying for it; null = off."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the value loss."""
