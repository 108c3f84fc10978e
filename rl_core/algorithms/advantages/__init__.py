"""Advantage estimators: one family per file, `compute_advantages` to call one by its registered name."""

from rl_core.algorithms.advantages.compute import compute_advantages
from rl_core.algorithms.advantages.distillation import distill_advantages, opd_advantages
from rl_core.algorithms.advantages.embodied import (
    action_log_probs,
    embodied_gae_advantages,
    embodied_loss_mask,
    episode_scores,
)
from rl_core.algorithms.advantages.gae import gae_advantages
from rl_core.algorithms.advantages.gdpo import gdpo_advantages
from rl_core.algorithms.advantages.group_relative import grpo_advantages, raw_advantages, rloo_advantages
from rl_core.algorithms.advantages.reinforce import reinforce_plus_plus_advantages
from rl_core.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from rl_core.algorithms.advantages.whitening import clip_advantages, whiten

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "action_log_probs",
    "clip_advantages",
    "compute_advantages",
    "distill_advantages",
    "embodied_gae_advantages",
    "embodied_loss_mask",
    "episode_scores",
    "gae_advantages",
    "gdpo_advantages",
    "grpo_advantages",
    "opd_advantages",
    "raw_advantages",
    "reinforce_plus_plus_advantages",
    "rloo_advantages",
    "whiten",
]
