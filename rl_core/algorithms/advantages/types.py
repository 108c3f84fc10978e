"""What advantage estimators take and give back.

Legend: B rows (completions), T tokens, N action chunks, C sub-steps of a chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from rl_core.algorithms.stats import Stat

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Sums a tensor over data-parallel ranks; every rank calls it equally often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """The rows of one rank. All rows of a group are on the same rank. Fields that an estimator does not need are None."""

    mask: Tensor
    """[B, T] bool: trainable tokens."""
    group_ids: Tensor | None = None
    """[B] int64: rows of one prompt have equal ids."""
    valid: Tensor | None = None
    """[B] bool: whether the row has a usable reward. None means that all have."""
    rewards: Tensor | None = None
    """[B]; [B, N, C] for embodied_gae."""
    token_rewards: Tensor | None = None
    """[B, T]."""
    reward_components: Mapping[str, Tensor] | None = None
    """Name -> [B]."""
    values: Tensor | None = None
    """[B, T] float32; one more step than rewards for embodied_gae."""
    log_probs: Tensor | None = None
    """[B, T] float32, of the policy."""
    ref_log_probs: Tensor | None = None
    """[B, T] float32, of the reference policy."""
    teacher_log_probs: Tensor | None = None
    """[B, T] float32, of the teacher."""
    dones: Tensor | None = None
    """[B, N + 1, C] bool."""
    bootstrap_values: Tensor | None = None
    """[B]: value after the last token; None = 0."""


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """What an estimator returns."""

    advantages: Tensor
    """[B, T] float32, exactly 0 where nothing trains."""
    returns: Tensor | None = None
    """[B, T] float32, the critic's target; None where the estimator has none."""
    metrics: dict[str, Stat] = field(default_factory=dict)
