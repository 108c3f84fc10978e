"""Advantages, losses, KL, aggregation, log-probabilities, rewards and filters as pure functions over tensors.

Every public name of the modules can be imported from here; a module is loaded when one of its names is first used, so
that torch-free processes (env workers, the runner) can use `registry`, `rewards` and `dynamic_sampling`.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "registry": ("names", "register", "resolve"),
    "advantages": (
        "AdvantageInputs",
        "AdvantageResult",
        "action_log_probs",
        "clip_advantages",
        "compute_advantages",
        "embodied_gae_advantages",
        "embodied_loss_mask",
        "episode_scores",
        "gae_advantages",
        "gdpo_advantages",
        "grpo_advantages",
        "opd_advantages",
        "place_terminal_reward",
        "raw_advantages",
        "reinforce_plus_plus_advantages",
        "rloo_advantages",
        "whiten",
    ),
    "losses": (
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
        "sft_loss",
    ),
    "kl": ("kl_loss", "kl_penalty"),
    "aggregation": (
        "LossNormalizers",
        "Stat",
        "aggregate",
        "count_normalizers",
        "finish_stats",
        "masked_mean",
        "masked_mean_ratio",
        "merge_stats",
    ),
    "logprobs": ("TokenScores", "hidden_scores", "token_entropy", "token_log_probs", "token_scores"),
    "rewards": (
        "compute_rewards",
        "exact_reward",
        "format_reward",
        "math_reward",
        "scale_rewards",
        "shape_overlong",
        "shape_stop_properly",
    ),
    "filtering": ("DynamicSampler", "down_sample", "informative_groups", "overlong_filter", "sequence_error_mask"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load the module that holds `name`."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
