"""A policy for observations that are vectors: two small networks, one for the actions and one for the value.

Legend: B simulators, C actions of a chunk, D dimensions of an action, S numbers of an observation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.policies.base import Mode, Policy, discrete_scores, layer, sample_discrete


class MLPPolicy(Policy):
    """Categorical over `num_actions`, or a normal distribution with `action_dim` dimensions whose deviation is a parameter."""

    def __init__(
        self,
        *,
        observation_size: int,
        num_actions: int | None = None,
        action_dim: int | None = None,
        chunk: int = 1,
        hidden: Sequence[int] = (64, 64),
        initial_log_std: float = 0.0,
    ) -> None:
        """Observations have `observation_size` numbers. Exactly one of `num_actions` and `action_dim` is given, else ValueError."""
        super().__init__()
        if (num_actions is None) == (action_dim is None):
            raise ValueError(
                f"num_actions or action_dim must be given, and not both, got {num_actions} and {action_dim}; remove one"
            )
        self.num_actions, self.chunk = num_actions, chunk
        self.action_dim = action_dim or 1
        outputs = chunk * (num_actions or self.action_dim)
        self.actor = _network(observation_size, hidden, outputs, gain=0.01)
        self.critic = _network(observation_size, hidden, 1, gain=1.0)
        if num_actions is None:
            self.log_std = nn.Parameter(torch.full((self.action_dim,), float(initial_log_std)))

    def predict(self, obs: dict[str, Tensor], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return actions [B, C] or [B, C, D] for `obs["states"]` [B, S]; see `Policy.predict`."""
        states = obs["states"].float()
        outputs = self._outputs(states)
        if self.num_actions is not None:
            actions, log_probs = sample_discrete(outputs, mode)
            log_probs = log_probs[..., None]
        else:
            spread = self.log_std.exp()
            actions = outputs + spread * torch.randn_like(outputs) if mode == "train" else outputs
            log_probs = torch.distributions.Normal(outputs, spread, validate_args=False).log_prob(actions)
        kept = {"states": states, "actions": actions}
        return actions, {"prev_logprobs": log_probs, "prev_values": self.critic(states), "forward_inputs": kept}

    def forward_train(self, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Return log-probabilities, entropies [B, C, D] and values [B, 1]; see `Policy.forward_train`."""
        states, actions = inputs["states"], inputs["actions"]
        outputs = self._outputs(states)
        if self.num_actions is not None:
            log_probs, entropy = (tensor[..., None] for tensor in discrete_scores(outputs, actions))
        else:
            normal = torch.distributions.Normal(outputs, self.log_std.exp(), validate_args=False)
            log_probs, entropy = normal.log_prob(actions), normal.entropy().expand_as(outputs)
        return {"log_probs": log_probs, "entropy": entropy, "values": self.critic(states)}

    def _outputs(self, states: Tensor) -> Tensor:
        """Return logits or means, [B, C, V] or [B, C, D]."""
        return self.actor(states).view(len(states), self.chunk, self.num_actions or self.action_dim)


def _network(inputs: int, hidden: Sequence[int], outputs: int, *, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [layer(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, layer(inputs, outputs, gain))
