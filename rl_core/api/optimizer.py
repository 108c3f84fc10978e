"""`spec.actor.optimizer`: settings of AdamW and its learning-rate schedule."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.cel import Cel


class ScheduleSpec(Spec):
    """The learning-rate schedule, over optimizer steps that were not skipped."""

    style: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up. wsd: constant, then a cosine decay over the last steps (decayRatio)."""
    decay_ratio: float | None = Field(None, gt=0, le=1)
    """wsd: share of all optimizer steps that decay; null = 0.1."""
    warmup_steps: int | None = Field(None, ge=0, lt=2**31)
    """Optimizer steps of linear warm-up; not together with warmupRatio."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Warm-up as a share of all optimizer steps."""
    min_learning_rate: float | None = Field(None, ge=0)
    """Smallest learning rate of the decay; not together with minLearningRateRatio."""
    min_learning_rate_ratio: float | None = Field(None, ge=0, le=1)
    """Smallest learning rate of the decay as a share of learningRate."""

    @rule(
        Cel(
            holds="!(has(self.warmupSteps) && has(self.warmupRatio))",
            refusal="give warmupSteps or warmupRatio, not both; remove one",
        ),
        Cel(
            holds="!(has(self.minLearningRate) && has(self.minLearningRateRatio))",
            refusal="give minLearningRate or minLearningRateRatio, not both; remove one",
        ),
        Cel(
            holds="$style == 'wsd' || !has(self.decayRatio)",
            refusal="decayRatio needs style wsd, got %s; choose it or remove decayRatio",
            values=("$style",),
            field="decayRatio",
        ),
    )
    def _one_of(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            yield ("give warmupSteps or warmupRatio, not both; remove one")
        if self.min_learning_rate is not None and self.min_learning_rate_ratio is not None:
            yield ("give minLearningRate or minLearningRateRatio, not both; remove one")
        if self.decay_ratio is not None and self.style != "wsd":
            yield f"decayRatio needs style wsd, got {self.style}; choose it or remove decayRatio"


class OptimizerSpec(Spec):
    """Settings of the AdamW optimizer."""

    learning_rate: float = Field(1.0e-6, gt=0)
    """Peak learning rate."""
    value_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the critic of gae, on the same schedule; null = learningRate."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Term added to the denominator for numerical stability."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay; not applied to 1-D parameters."""
    distributed: bool = True
    """Shard the optimizer state over the data-parallel processes; false, with megatron only: each process has all of it."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Learning-rate schedule."""

    @rule(
        Cel(
            holds=(
                "!has(self.schedule)"
                " || !has(self.schedule.minLearningRate) || self.schedule.minLearningRate <= $learningRate"
            ),
            refusal="schedule.minLearningRate must not exceed learningRate %s, got %s; lower it",
            values=("$learningRate", "self.schedule.minLearningRate"),
            field="schedule.minLearningRate",
        )
    )
    def _floor(self) -> Iterator[str]:
        floor = self.schedule.min_learning_rate
        if floor is not None and floor > self.learning_rate:
            yield (
                f"schedule.minLearningRate must not exceed learningRate {self.learning_rate:g}, got {floor:g}; lower it"
            )
