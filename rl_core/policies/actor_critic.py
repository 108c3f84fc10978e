"""`ActorCritic`, the base class of policies whose networks return the parameters of a distribution over actions, and a value.

Shapes: B simulators, C actions in a chunk, D dimensions of an action, V classes.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_core.messages.embodied import Mode
from rl_core.policies.base import Policy, discrete_scores, evaluation_scale, sample_discrete


class ActorCritic(Policy):
    """A policy with discrete actions (a categorical distribution over `num_actions` classes) or continuous ones (a normal distribution).

    The normal distribution has `action_dim` independent dimensions. The networks return its mean; its standard deviation is a parameter
    that does not depend on the observation.
    """

    observation: ClassVar[str]
    """Key of the observation that the networks read."""

    def __init__(
        self,
        *,
        num_actions: int | None,
        action_dim: int | None,
        chunk: int,
        initial_log_std: float = 0.0,
        temperature_train: float = 1.0,
        temperature_eval: float = 0.0,
    ) -> None:
        """Choose the distribution. Raises ValueError unless exactly one of `num_actions` and `action_dim` is given.

        - `chunk`: number of actions that one prediction returns.
        - `initial_log_std`: logarithm of the standard deviation before training.
        - `temperature_train`: what logits are divided by, in rollouts and in training.
        - `temperature_eval`: the same in evaluations; 0 means that the most likely action is taken.

        Temperatures are for discrete actions only.
        """
        super().__init__()
        if (num_actions is None) == (action_dim is None):
            raise ValueError(
                f"num_actions or action_dim must be given, and not both, got {num_actions} and {action_dim}; remove one"
            )
        if num_actions is None and (temperature_train, temperature_eval) != (1.0, 0.0):
            raise ValueError(
                f"temperatures must be left out with action_dim, got {temperature_train:g} and {temperature_eval:g}; use initial_log_std"
            )
        self.temperature = temperature_train
        self._eval_scale = evaluation_scale(temperature_train, temperature_eval)
        self.num_actions, self.chunk = num_actions, chunk
        self.action_dim = action_dim or 1
        self.num_outputs = chunk * (num_actions or self.action_dim)
        if num_actions is None:
            self.log_std = nn.Parameter(torch.full((self.action_dim,), float(initial_log_std)))

    @abstractmethod
    def networks(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits or means [B, num_outputs], and the values [B, 1], for observations [B, ...]."""

    def predict(self, obs: dict[str, Tensor], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return discrete actions [B, C] or continuous ones [B, C, D]; see `Policy.predict`."""
        outputs, values = self._outputs(obs[self.observation])
        actions, result = self._choose(obs[self.observation], outputs, mode)
        return actions, result | {"prev_values": values}

    def _choose(self, observed: Tensor, outputs: Tensor, mode: Mode) -> tuple[Tensor, dict[str, Any]]:
        """Return actions for logits [B, C, V] or means [B, C, D], and what `predict` returns besides but the values."""
        if self.num_actions is not None:
            actions, log_probs = sample_discrete(outputs, mode, eval_scale=self._eval_scale)
            log_probs = log_probs[..., None]
        else:
            spread = self.log_std.exp()
            actions = outputs + spread * torch.randn_like(outputs) if mode == "train" else outputs
            log_probs = torch.distributions.Normal(outputs, spread, validate_args=False).log_prob(actions)
        forward_inputs = {self.observation: observed, "actions": actions}
        return actions, {"prev_logprobs": log_probs, "forward_inputs": forward_inputs}

    def forward_train(self, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Return log-probabilities, entropies [B, C, D] and values [B, 1]; see `Policy.forward_train`."""
        actions = inputs["actions"]
        outputs, values = self._outputs(inputs[self.observation])
        if self.num_actions is not None:
            log_probs, entropy = (tensor[..., None] for tensor in discrete_scores(outputs, actions))
        else:
            normal = torch.distributions.Normal(outputs, self.log_std.exp(), validate_args=False)
            log_probs, entropy = normal.log_prob(actions), normal.entropy().expand_as(outputs)
        return {"log_probs": log_probs, "entropy": entropy, "values": values}

    def _outputs(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, C, V] or means [B, C, D], and values [B, 1]."""
        outputs, values = self.networks(observed)
        return self._by_action(outputs), values

    def _by_action(self, outputs: Tensor) -> Tensor:
        """Return outputs [B, num_outputs] of the networks as logits [B, C, V] or means [B, C, D]."""
        if self.temperature != 1.0:
            outputs = outputs / self.temperature
        return outputs.view(len(outputs), self.chunk, self.num_actions or self.action_dim)
