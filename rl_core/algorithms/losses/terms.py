"""Terms beside the policy loss (entropy) and their weighted sum. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses.ratio import trainable_only
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.stats import mean_stat, sum_stat


def entropy_term(
    entropy: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the aggregated per-token `entropy` [B, T], to be subtracted. Metric `entropy` (token mean)."""
    (masked,) = trainable_only(mask, log_probs=entropy)
    total = weighted_aggregate(masked, mask, None, aggregation, normalizers, max_tokens)
    return LossResult(total, {"entropy": mean_stat(masked, mask)})


def combine_losses(
    policy: LossResult,
    *,
    kl: LossResult | None = None,
    kl_coefficient: float = 0.0,
    entropy: LossResult | None = None,
    entropy_coefficient: float = 0.0,
    value: LossResult | None = None,
    value_coefficient: float = 1.0,
    distillation: LossResult | None = None,
) -> LossResult:
    """Return policy + kl_coefficient KL - entropy_coefficient H + value_coefficient V + distillation.

    Metrics of all terms and `loss`, the sum. A term with coefficient 0 is reported only. Raises ValueError for a
    non-zero coefficient without its term; `value_coefficient` 1.0 is the default and needs no term.
    """
    terms = (
        ("kl", kl, kl_coefficient, 1.0),
        ("entropy", entropy, entropy_coefficient, -1.0),
        ("distillation", distillation, 0.0 if distillation is None else 1.0, 1.0),
        ("value", value, 0.0 if value is None and value_coefficient == 1.0 else value_coefficient, 1.0),
    )
    loss, metrics = policy.loss, dict(policy.metrics)
    for name, term, coefficient, sign in terms:
        if term is None:
            if coefficient:
                raise ValueError(f"{name}_coefficient must be 0 without its term, got {coefficient}; pass {name}=")
            continue
        metrics |= term.metrics
        if coefficient:
            loss = torch.add(loss, term.loss, alpha=sign * coefficient)
    return LossResult(loss, metrics | {"loss": sum_stat(loss)})
