"""The rule of `rollout.autoscale`: how many rollouts a job should have, from the idle times that its runner measured. Pure.

    The trainer waits, rollouts do not   More rollouts: as many as would keep the trainer busy, at most twice as many.
    Rollouts are idle                    Fewer: as many as would be idle for targetIdle of the time, at least half as many.
    Otherwise                            The number stays.

On policy, nothing can be generated while the trainer trains, whatever the number of rollouts. This idle time therefore never decreases the
number of rollouts; only idle time during generation does. It still limits an increase: with any number of rollouts, a step takes at least
as long as its training.

The runner starts a new measurement when a rollout joins or leaves, so that each decision rests on a full window with one number of
rollouts. A rollout may never join, because no node has room for it or because it fails at its start. The estimate therefore starts from the
number that was measured. An estimate between that number and `rollout.replicas` changes nothing: more rollouts may be on their way.
A decrease never goes so far that an increase would follow, and HYSTERESIS keeps noise from changing the number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.api.roles import RolloutSpec

HYSTERESIS = 0.05
"""Difference between a measured fraction and its target below which the number of rollouts is not changed."""
ROUNDING = 1e-9
"""Tolerance for a product that should be a whole number and exceeds it by rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleShares:
    """Idle times as fractions, from 0 to 1, of the measurement window of the runner (`/status.workload`)."""

    rollouts: int
    """Number of rollouts measured."""
    starved: float
    """Fraction of the window in which a rollout had nothing to generate, mean over the rollouts."""
    trainer_starved: float
    """Fraction of the window in which the trainer waited for prompt groups."""
    starved_in_training: float = 0.0
    """The part of `starved` in which the trainer did not wait for prompt groups, as a fraction of the window."""
    seconds: float
    """Length of the window, in seconds."""

    @property
    def starved_in_generation(self) -> float:
        """Fraction of the trainer's waiting time in which a rollout had nothing to generate, mean over the rollouts."""
        idle = max(self.starved - self.starved_in_training, 0.0)
        generation = max(self.trainer_starved, idle)
        return idle / generation if generation else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingVerdict:
    """A new number of rollouts, and the reason as text."""

    replicas: int
    reason: str


def read(workload: Any) -> IdleShares | None:
    """Return the idle times of `/status.workload`; None while the window is not full, or if a value is invalid."""
    if not isinstance(workload, Mapping) or workload.get("full") is not True:
        return None
    numbers = [workload.get("starved"), workload.get("actorStarved"), workload.get("starvedInTraining", 0.0)]
    numbers.append(workload.get("seconds"))
    measured = workload.get("rollouts")
    if not isinstance(measured, list) or not all(_is_number(number) for number in numbers):
        return None
    starved, trainer, in_training, seconds = (float(number) for number in numbers if number is not None)
    if not all(0 <= share <= 1 for share in (starved, trainer, in_training)):
        return None
    return IdleShares(
        rollouts=len(measured),
        starved=starved,
        trainer_starved=trainer,
        starved_in_training=in_training,
        seconds=seconds,
    )


def decide(rollout: RolloutSpec, shares: IdleShares | None, *, on_policy: bool) -> ScalingVerdict | None:
    """Return the new number of pods of rollouts, or None to keep `rollout.replicas`. `on_policy` says whether algorithm.maxStaleness is 0."""
    rule, present = rollout.autoscale, rollout.replicas
    if rule is None or shares is None or shares.rollouts > present * rollout.engines:
        return None
    joined = -(-shares.rollouts // rollout.engines)
    excess = shares.starved_in_generation if on_policy else shares.starved
    proposed = _wanted(joined, shares, excess, rule.target_idle)
    if proposed >= joined:
        proposed = max(proposed, present)
    low = max(rule.min, rollout.min_replicas)
    high = min(rule.max, rule.max if rollout.max_replicas is None else rollout.max_replicas)
    replicas = min(max(proposed, low), high)
    if replicas == present:
        return None
    generation = f", for {excess:.0%} of generation" if on_policy else ""
    measured = "rollouts" if joined == present else f"the {joined} that have joined"
    reason = (
        f"rollout.replicas {present} -> {replicas}: over {shares.seconds:.0f} s {measured} had nothing to generate for "
        f"{shares.starved:.0%} of the time{generation} (targetIdle {rule.target_idle:.0%}), the trainer nothing to train for "
        f"{shares.trainer_starved:.0%}"
    )
    return ScalingVerdict(replicas=replicas, reason=reason)


def _wanted(present: int, shares: IdleShares, excess: float, target: float) -> int:
    """Return the number of rollouts before limits apply.

    `excess` is the fraction of time in which fewer rollouts could do the same work.
    """
    band = min(HYSTERESIS, target / 2)
    starved_share = shares.trainer_starved
    if excess > target + band:
        same_work = math.ceil(present * (1 - excess) / (1 - target) - ROUNDING)
        return max(same_work, math.ceil(present / 2))
    if max(excess, shares.starved) < target - band and starved_share > HYSTERESIS:
        feeding = math.ceil(present / max(1 - starved_share, 0.5) - ROUNDING)
        return min(max(feeding, present + 1), 2 * present)
    return present


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
