"""Advantage estimators: one family per file, `compute_advantages` to call one by its registered name."""

from rl_core.algorithms.advantages.compute import compute_advantages
from rl_core.algorithms.advantages.group_relative import grpo_advantages, raw_advantages, rloo_advantages
from rl_core.algorithms.advantages.reinforce import place_terminal_reward, reinforce_plus_plus_advantages
from rl_core.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from rl_core.algorithms.advantages.whitening import clip_advantages, whiten

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "clip_advantages",
    "compute_advantages",
    "grpo_advantages",
    "place_terminal_reward",
    "raw_advantages",
    "reinforce_plus_plus_advantages",
    "rloo_advantages",
    "whiten",
]
