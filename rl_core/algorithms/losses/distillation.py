"""The loss of distillation over the candidates of a teacher. Legend: B rows, T tokens, K candidates."""

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.stats import mean_stat

LARGEST_LOG_MASS = -1e-7
"""Largest logarithm of the probability that all candidates have together, because float32 does not tell larger ones from 0."""


def top_k_distillation_loss(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the aggregated reverse KL from the student to the teacher over K candidates and a bin for all other tokens.

    `log_probs` and `teacher_log_probs` [B, T, K] are log-probabilities of the same candidates under student and teacher. With p and q for
    them, and p_0 = 1 - sum p and q_0 = 1 - sum q for the bin, the KL of a token is sum p (log p - log q) + p_0 (log p_0 - log q_0). Without
    the bin a student would lower it by moving probability away from the candidates. Gradients flow into `log_probs` only.
    Metric `distill/top_k_kl` (token mean). Source: Agarwal et al., "On-Policy Distillation of Language Models" (2024), equation 2; the bin
    is that of TRL's distillation trainers.
    """
    require_float32(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    require_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    require_bool(mask=mask)
    require_same_shape(mask=mask, **{"log_probs without candidates": log_probs[..., 0]})
    # Tokens that do not train have log-probability 0 for every candidate; any distribution serves there.
    trains = mask.unsqueeze(-1)
    filler = -float(log_probs.shape[-1] + 1)
    student, teacher = (
        with_bin(torch.where(trains, values, filler)) for values in (log_probs, teacher_log_probs.detach())
    )
    values = (student.exp() * (student - teacher)).sum(dim=-1)
    loss = weighted_aggregate(values, mask, None, aggregation, normalizers, max_tokens)
    return LossResult(loss, {"distill/top_k_kl": mean_stat(values, mask)})


def with_bin(log_probs: Tensor) -> Tensor:
    """Return `log_probs` [..., K] with the log-probability of all other tokens together, [..., K + 1]."""
    mass = log_probs.logsumexp(dim=-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)
    return torch.cat([log_probs, (-torch.expm1(mass)).log()], dim=-1)
