"""The learning rate schedule and the counters of optimizer steps. Pure; the same for every backend."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.optimizer import OptimizerSpec

STYLES = ("constant", "linear", "cosine", "wsd")
DECAY_RATIO = 0.1
"""Share of all optimizer steps that decay in the style wsd, unless the job says another."""
ROUNDING = 1e-6
"""Added before a product is rounded down to whole steps, because 0.29 x 100 is 28.999999999999996 in floating point."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments that AdamW stores for each parameter, in torch and in megatron-core."""


CRITIC = "critic"
"""Key of an optimizer's parameter group that says whether it is the critic's."""


@dataclass(slots=True)
class OptimizerCounts:
    """Numbers of optimizer steps by result; the learning rate schedule is a function of `applied`."""

    attempted: int = 0
    """Optimizer steps that had a gradient."""
    applied: int = 0
    """Optimizer steps that updated the weights."""
    skipped: int = 0
    """Optimizer steps that changed nothing because the gradient norm was not finite."""
    empty: int = 0
    """Mini-batches without a trainable token on any rank."""


def peak_rate(spec: OptimizerSpec, *, critic: bool) -> float:
    """Return the peak learning rate of the policy or of the critic."""
    critic_rate = spec.value_learning_rate if critic else None
    return spec.learning_rate if critic_rate is None else critic_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSchedule:
    """Linear warm-up to `peak`, then constant, linear or cosine decay to `floor` at step `total`, or constant before a cosine decay (wsd).

    Raises ConfigError for an unknown style, a warm-up as long as the run, warm-up and decay that are longer than it, or a floor above the
    peak.
    """

    peak: float
    """Largest learning rate."""
    total: int
    """Number of optimizer steps of the run."""
    style: str = "constant"
    """Form of the decay: constant, linear, cosine, or wsd (Hu et al. 2024, "MiniCPM"): warm-up, stable, decay."""
    warmup: int = 0
    """Steps of linear warm-up."""
    decay: int = 0
    """Steps of the decay at the end; with the style wsd only."""
    floor: float = 0.0
    """Learning rate at the end of the decay."""

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"schedule.style must be one of {', '.join(STYLES)}, got {self.style!r}; choose one")
        if self.warmup and self.warmup >= self.total:
            raise ConfigError(
                f"schedule.warmupSteps must be below the run's {self.total} optimizer steps, got {self.warmup}; lower it"
            )
        if self.warmup + self.decay > self.total:
            raise ConfigError(
                f"schedule.warmupSteps and the steps of the decay must fit into the run's {self.total} optimizer steps, got {self.warmup} and "
                f"{self.decay}; lower warmupSteps or decayRatio"
            )
        if self.floor > self.peak:
            raise ConfigError(
                f"schedule.minLearningRate must not exceed learningRate {self.peak}, got {self.floor}; lower it"
            )

    @classmethod
    def from_spec(cls, optimizer: OptimizerSpec | Mapping[str, Any], *, total: int) -> "LRSchedule":
        """Return the schedule of `actor.optimizer` over `total` optimizer steps."""
        spec = optimizer if isinstance(optimizer, OptimizerSpec) else OptimizerSpec.model_validate(dict(optimizer))
        schedule, peak = spec.schedule, spec.learning_rate
        warmup = schedule.warmup_steps
        if schedule.warmup_ratio is not None:
            warmup = int(schedule.warmup_ratio * total + ROUNDING)
        floor = schedule.min_learning_rate
        if schedule.min_learning_rate_ratio is not None:
            floor = schedule.min_learning_rate_ratio * peak
        decay = 0
        if schedule.style == "wsd":
            decay = int((schedule.decay_ratio or DECAY_RATIO) * total + ROUNDING)
        return cls(peak=peak, total=total, style=schedule.style, warmup=warmup or 0, decay=decay, floor=floor or 0.0)

    def __call__(self, step: int) -> float:
        """Return the learning rate of applied optimizer step number `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "constant":
            return self.peak
        start = self.total - self.decay if self.style == "wsd" else self.warmup
        progress = min(1.0, max(0.0, (step - start) / max(self.total - start, 1)))
        multiplier = 1 - progress if self.style == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (self.peak - self.floor) * multiplier
