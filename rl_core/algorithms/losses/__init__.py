"""Losses: policy losses, the critic's, further terms, and the correction of train/rollout mismatch."""

from rl_core.algorithms.losses.compute import compute_policy_loss
from rl_core.algorithms.losses.critic import critic_loss, explained_variance
from rl_core.algorithms.losses.decoupled import decoupled_ppo_loss
from rl_core.algorithms.losses.distillation import top_k_distillation_loss
from rl_core.algorithms.losses.importance import importance_weights
from rl_core.algorithms.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss
from rl_core.algorithms.losses.terms import combine_losses, entropy_term
from rl_core.algorithms.losses.types import LossInputs, LossResult

__all__ = [
    "LossInputs",
    "LossResult",
    "cispo_loss",
    "combine_losses",
    "compute_policy_loss",
    "critic_loss",
    "decoupled_ppo_loss",
    "entropy_term",
    "explained_variance",
    "gspo_loss",
    "importance_weights",
    "ppo_clip_loss",
    "reinforce_loss",
    "top_k_distillation_loss",
]
