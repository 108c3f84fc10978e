"""A policy for observations that are vectors: two small networks, one for the actions and one for the value.

Legend: B simulators, S numbers of an observation.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_core.messages.embodied import Mode
from rl_core.policies.actor_critic import ActorCritic
from rl_core.policies.base import Reduce, layer

NORMALIZED_LIMIT = 10.0
"""Largest number of a normalized observation."""


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
        temperature_train: float = 1.0,
        temperature_eval: float = 0.0,
        normalize: bool = False,
    ) -> None:
        """Observations have `observation_size` numbers. See `ActorCritic` for the actions.

        With `normalize` the networks see each number less its mean, in standard deviations, over all observations that were trained on.
        """
        super().__init__(
            num_actions=num_actions,
            action_dim=action_dim,
            chunk=chunk,
            initial_log_std=initial_log_std,
            temperature_train=temperature_train,
            temperature_eval=temperature_eval,
        )
        self.actor = _network(observation_size, hidden, self.num_outputs, gain=0.01)
        self.critic = _network(observation_size, hidden, 1, gain=1.0)
        self.normalize = normalize
        if normalize:
            self.register_buffer("mean", torch.zeros(observation_size))
            self.register_buffer("variance", torch.ones(observation_size))
            self.register_buffer("count", torch.zeros(1))

    def networks(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and values for states [B, S]."""
        states = self._normalized(observed)
        return _run(self.actor, states), _run(self.critic, states)

    def act(self, obs: dict[str, Tensor], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return what `predict` returns, without values."""
        observed = obs[self.observation]
        return self._choose(observed, self._by_action(_run(self.actor, self._normalized(observed))), mode)

    def values(self, obs: dict[str, Tensor]) -> Tensor:
        """Return the values [B, 1] that `predict` returns."""
        return _run(self.critic, self._normalized(obs[self.observation]))

    def _normalized(self, observed: Tensor) -> Tensor:
        """Return states [B, S] as the networks see them."""
        if not self.normalize:
            return observed
        states = observed.to(self.critic[-1].weight.dtype)
        return ((states - self.mean) * (self.variance + 1e-8).rsqrt()).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def update_statistics(self, inputs: dict[str, Tensor], reduce: Reduce) -> None:
        """Add the observations of a step to mean and variance; see `Policy.update_statistics`."""
        if not self.normalize:
            return
        states = inputs["states"].double()
        sums = torch.cat([torch.tensor([float(len(states))]).double(), states.sum(dim=0), states.square().sum(dim=0)])
        sums = reduce(sums) if reduce is not None else sums
        num_new, size = sums[0], states.shape[1]
        if not num_new:
            return
        mean, square = sums[1 : size + 1] / num_new, sums[size + 1 :] / num_new
        share = (num_new / (self.count.double().cpu() + num_new)).item()
        old_mean, old_variance = self.mean.double().cpu(), self.variance.double().cpu()
        difference = mean - old_mean
        merged = (
            (1 - share) * old_variance + share * (square - mean.square()) + share * (1 - share) * difference.square()
        )
        self.mean.copy_(old_mean + share * difference)
        self.variance.copy_(merged)
        self.count.add_(num_new.item())


def _run(network: nn.Sequential, states: Tensor) -> Tensor:
    """Return the outputs of a network. For networks this small a call of each layer as a module takes longer than its numbers do."""
    for module in network:
        if isinstance(module, nn.Linear):
            weight = module.weight
            states = states if states.dtype == weight.dtype else states.to(weight.dtype)
            states = functional.linear(states, weight, module.bias)
        else:
            states = states.tanh()
    return states


def _network(inputs: int, hidden: Sequence[int], outputs: int, *, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [layer(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, layer(inputs, outputs, gain))
