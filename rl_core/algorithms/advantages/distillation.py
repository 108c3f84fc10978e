"""On-policy distillation: the advantage of a token is how much more likely the teacher makes it. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.group_relative import grpo_advantages
from rl_core.algorithms.advantages.groups import per_row
from rl_core.algorithms.advantages.types import AdvantageResult
from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape
from rl_core.algorithms.stats import Stat, mean_stat

NOISE = 1e-4
"""Differences of log-probabilities, in nats, that two engines give for the same float32 model; they are no signal of a teacher."""


def opd_advantages(teacher_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> AdvantageResult:
    """Return teacher minus student log-probability of each trainable token, [B, T] float32, without gradient.

    Source: Gu et al., "MiniLLM" (2024); Thinking Machines, "On-Policy Distillation" (2025).
    """
    require_float32(teacher_log_probs=teacher_log_probs, log_probs=log_probs)
    require_bool(mask=mask)
    require_same_shape(teacher_log_probs=teacher_log_probs, log_probs=log_probs, mask=mask)
    advantages = torch.where(mask, teacher_log_probs.detach() - log_probs.detach(), 0.0)
    return AdvantageResult(advantages)


def distill_advantages(
    teacher_log_probs: Tensor,
    log_probs: Tensor,
    mask: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid: Tensor | None = None,
    reward_weight: float = 0.0,
    teacher_in_loss: bool = False,
) -> AdvantageResult:
    """Return the advantages of `opd_advantages` plus `reward_weight` times those of `grpo_advantages`, [B, T] float32.

    `teacher_in_loss` leaves the teacher's part out of the advantages, for a loss that has it (`top_k_distillation_loss`).

    The teacher's part is minus the gradient coefficient of the reverse KL from the student to the teacher, estimated at the sampled tokens.
    Metrics: `distill/reverse_kl`, the mean of student minus teacher log-probability, and `distill/teacher_share`, the share of the teacher's
    part in the sum of the absolute values of both parts, without differences below NOISE. The teacher's part is 0 if all of it is noise:
    an optimizer that normalizes gradients would make full steps of it.
    """
    teacher = opd_advantages(teacher_log_probs, log_probs, mask).advantages
    grpo = grpo_advantages(rewards, group_ids, mask, valid=valid)
    if valid is not None:
        teacher = torch.where(per_row(valid, teacher), teacher, 0.0)
    trains = mask if valid is None else mask & per_row(valid, mask)
    teacher_sum = torch.where(teacher.abs() > NOISE, teacher.abs(), 0.0).sum()
    teacher = torch.where(teacher_sum > 0, teacher, 0.0)
    reward_sum = reward_weight * grpo.advantages.abs().sum()
    metrics = {
        **grpo.metrics,
        "distill/reverse_kl": mean_stat(-teacher, trains),
        "distill/teacher_share": Stat("mean", teacher_sum, teacher_sum + reward_sum),
    }
    advantages = reward_weight * grpo.advantages
    return AdvantageResult(advantages if teacher_in_loss else teacher + advantages, None, metrics)
