"""The built-in estimators in the registry's convention `fn(inputs, **options)`."""

from rl_core.algorithms.advantages.distillation import opd_advantages
from rl_core.algorithms.advantages.embodied import embodied_gae_advantages
from rl_core.algorithms.advantages.gae import gae_advantages
from rl_core.algorithms.advantages.gdpo import gdpo_advantages
from rl_core.algorithms.advantages.group_relative import grpo_advantages, raw_advantages, rloo_advantages
from rl_core.algorithms.advantages.reinforce import reinforce_plus_plus_advantages
from rl_core.algorithms.advantages.types import AdvantageInputs
from rl_core.algorithms.binding import from_inputs

grpo = from_inputs(grpo_advantages, AdvantageInputs)
dr_grpo = from_inputs(grpo_advantages, AdvantageInputs, scale="none")
rloo = from_inputs(rloo_advantages, AdvantageInputs)
reinforce_plus_plus = from_inputs(reinforce_plus_plus_advantages, AdvantageInputs)
reinforce_plus_plus_baseline = from_inputs(reinforce_plus_plus_advantages, AdvantageInputs, baseline="group_mean")
gae = from_inputs(gae_advantages, AdvantageInputs, nullable=("values",))
embodied_gae = from_inputs(embodied_gae_advantages, AdvantageInputs)
gdpo = from_inputs(gdpo_advantages, AdvantageInputs)
opd = from_inputs(opd_advantages, AdvantageInputs)
raw = from_inputs(raw_advantages, AdvantageInputs)

SELF_WHITENING = frozenset({reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo})
"""Estimators that whiten themselves; whitening their result again would be a second time."""
