"""The built-in policy losses in the registry's convention `fn(inputs, **options)`."""

from rl_core.algorithms.binding import from_inputs
from rl_core.algorithms.losses.decoupled import decoupled_ppo_loss
from rl_core.algorithms.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss
from rl_core.algorithms.losses.types import LossInputs

ppo_clip = from_inputs(ppo_clip_loss, LossInputs)
cispo = from_inputs(cispo_loss, LossInputs)
gspo = from_inputs(gspo_loss, LossInputs)
reinforce = from_inputs(reinforce_loss, LossInputs)
decoupled_ppo = from_inputs(decoupled_ppo_loss, LossInputs)
