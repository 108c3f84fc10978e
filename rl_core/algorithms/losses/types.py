"""The inputs and the result of a loss function, and the aggregation that every loss ends with. Legend: B rows, T tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers, aggregate
from rl_core.algorithms.arguments import require_float32, require_same_shape
from rl_core.algorithms.stats import Stat


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One micro-batch for a policy loss; tensors are [B, T] and fields a loss does not need stay None."""

    log_probs: Tensor
    """float32, of the policy in training; the only field that carries gradient."""
    advantages: Tensor
    """float32."""
    mask: Tensor
    """bool: trainable tokens."""
    old_log_probs: Tensor | None = None
    """float32, of the policy before this step's updates."""
    weights: Tensor | None = None
    """Factor on the token loss, such as an importance weight."""
    proximal_log_probs: Tensor | None = None
    """float32, of the proximal policy of decoupled_ppo."""
    behavior_versions: Tensor | None = None
    """Policy version that generated the token; negative = none."""
    current_version: int | None = None
    """Policy version in training."""
    normalizers: LossNormalizers | None = None
    """Global counts of the optimizer step; None counts this micro-batch."""
    max_tokens: int | None = None
    """Response limit, for `seq-mean-token-sum-norm`."""
    aggregation: str = "token-mean"
    """How token losses become one number."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss and its metrics."""

    loss: Tensor
    """0-d, this micro-batch's share of the step's loss."""
    metrics: dict[str, Stat] = field(default_factory=dict)


def weighted_aggregate(
    values: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    aggregation: str,
    normalizers: LossNormalizers | None,
    max_tokens: int | None,
) -> Tensor:
    """Return the aggregated `values`, each first multiplied by its weight; weights do not enter the normalisers."""
    if weights is not None:
        require_float32(weights=weights)
        require_same_shape(weights=weights, mask=mask)
        values = values * torch.where(mask, weights.detach(), 0.0)
    return aggregate(values, mask, mode=aggregation, normalizers=normalizers, max_tokens=max_tokens)
