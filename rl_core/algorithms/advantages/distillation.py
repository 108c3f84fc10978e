"""On-policy distillation: the advantage of a token is how much more likely the teacher makes it. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.types import AdvantageResult
from rl_core.algorithms.arguments import require_bool, require_float32, require_same_shape


def opd_advantages(teacher_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> AdvantageResult:
    """Return teacher minus student log-probability of each trainable token, [B, T] float32, without gradient.

    Source: Gu et al., "MiniLLM" (2024); Thinking Machines, "On-Policy Distillation" (2025).
    """
    require_float32(teacher_log_probs=teacher_log_probs, log_probs=log_probs)
    require_bool(mask=mask)
    require_same_shape(teacher_log_probs=teacher_log_probs, log_probs=log_probs, mask=mask)
    advantages = torch.where(mask, teacher_log_probs.detach() - log_probs.detach(), 0.0)
    return AdvantageResult(advantages)
