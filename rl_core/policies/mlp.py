"""A policy for observations that are vectors: two small networks, one for the actions and one for the value.

Legend: B simulators, S numbers of an observation.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from rl_core.policies.actor_critic import ActorCritic
from rl_core.policies.base import layer


class MLPPolicy(ActorCritic):
    """An `ActorCritic` of `obs["states"]` [B, S]."""

    observation: ClassVar[str] = "states"

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
        """Observations have `observation_size` numbers. See `ActorCritic` for the actions."""
        super().__init__(num_actions=num_actions, action_dim=action_dim, chunk=chunk, initial_log_std=initial_log_std)
        self.actor = _network(observation_size, hidden, self.num_outputs, gain=0.01)
        self.critic = _network(observation_size, hidden, 1, gain=1.0)

    def networks(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and values for states [B, S]."""
        states = observed.to(self.critic[-1].weight.dtype)
        return self.actor(states), self.critic(states)


def _network(inputs: int, hidden: Sequence[int], outputs: int, *, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [layer(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, layer(inputs, outputs, gain))
