"""How many rollouts a job should have by what its runner measured: the rule of `rollout.autoscale`. Pure; the operator and the local launcher ask it.

    trainer starves, rollouts do not   more: what would feed it, at most twice as many
    rollouts starve                    fewer: what would starve as long as targetIdle, at least half as many
    else                               as many as there are

The runner's window is the rule's memory: it begins anew when a rollout comes or goes, so each decision rests on a whole window of the
present size. A step down is never so far that the next would be up, and HYSTERESIS keeps noise from moving anything.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.api.roles import RolloutSpec

HYSTERESIS = 0.05
"""How far a share must be from the wanted one before anything is done about it."""
ROUNDING = 1e-9
"""A product that should be whole may come out so much above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What the runner's window tells (`/status.workload`)."""

    rollouts: int
    """Rollouts that it measured."""
    starved: float
    """Share of the window in which a rollout had nothing to generate, on average."""
    trainer_starved: float
    """Share in which the trainer waited for groups."""
    seconds: float
    """Length of the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Another number of rollouts, and why."""

    replicas: int
    reason: str


def read(workload: Any) -> Shares | None:
    """Return the shares of a whole window; None while it is not whole, and for what makes no sense."""
    if not isinstance(workload, Mapping) or workload.get("full") is not True:
        return None
    numbers = [workload.get(name) for name in ("starved", "actorStarved", "seconds")]
    measured = workload.get("rollouts")
    if not isinstance(measured, list) or not all(_is_number(number) for number in numbers):
        return None
    starved, trainer, seconds = (float(number) for number in numbers if number is not None)
    if not (0 <= starved <= 1 and 0 <= trainer <= 1):
        return None
    return Shares(rollouts=len(measured), starved=starved, trainer_starved=trainer, seconds=seconds)


def decide(rollout: RolloutSpec, shares: Shares | None) -> Verdict | None:
    """Return the number of rollouts that should be wanted instead of `rollout.replicas`; None = as many as are wanted."""
    rule, present = rollout.autoscale, rollout.replicas
    if rule is None or shares is None or shares.rollouts != present:
        return None
    wanted = _wanted(present, shares, rule.target_idle)
    low = max(rule.min, rollout.min_replicas)
    high = min(rule.max, rule.max if rollout.max_replicas is None else rollout.max_replicas)
    replicas = min(max(wanted, low), high)
    if replicas == present:
        return None
    reason = (
        f"rollout.replicas {present} -> {replicas}: over {shares.seconds:.0f} s rollouts had nothing to generate for {shares.starved:.0%} of the "
        f"time (targetIdle {rule.target_idle:.0%}), the trainer nothing to train for {shares.trainer_starved:.0%}"
    )
    return Verdict(replicas=replicas, reason=reason)


def _wanted(present: int, shares: Shares, target: float) -> int:
    band = min(HYSTERESIS, target / 2)
    idle, waits = shares.starved, shares.trainer_starved
    if idle > target + band:
        same_work = math.ceil(present * (1 - idle) / (1 - target) - ROUNDING)
        return max(same_work, math.ceil(present / 2))
    if idle < target - band and waits > HYSTERESIS:
        feeding = math.ceil(present / max(1 - waits, 0.5) - ROUNDING)
        return min(max(feeding, present + 1), 2 * present)
    return present


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
