"""The interface of a policy that acts in simulators.

A policy is a `torch.nn.Module`. A rollout calls `predict` and keeps what it returns; the trainer calls `forward_train` with the kept
`forward_inputs`, and must get the log-probabilities that `predict` gave as long as the weights are the same.

Legend: B simulators, C actions of a chunk, D tokens or dimensions of an action.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.messages.embodied import Mode

Reduce = Callable[[Tensor], Tensor] | None
"""Sums a tensor over the trainer's data ranks; None where there is one."""


class Policy(nn.Module):  # type: ignore[misc]
    """A policy; a class of the user need not derive from it, but must have both methods."""

    @abstractmethod
    def predict(self, obs: dict[str, Tensor], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return actions [B, C] (discrete) or [B, C, D], and the values of the policy that chose them.

        `obs` maps names to [B, ...]. In mode "eval" the most likely action is taken. The dict has `prev_logprobs` [B, C, D] float32,
        `prev_values` [B, 1] float32 or None, and `forward_inputs`, name -> [B, ...]: what `forward_train` needs of the decision.
        """

    @abstractmethod
    def forward_train(self, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Return `log_probs` and `entropy` [B, C, D], and `values` [B, 1] or None, with gradient, for kept `forward_inputs`."""

    def update_statistics(self, inputs: dict[str, Tensor], reduce: Reduce) -> None:
        """Update buffers that summarize observations, such as means, after each training step. Optional; does nothing by default.

        `inputs` are the kept `forward_inputs` of the step's rows on this rank, on the CPU. Buffers are published with the weights and kept
        in checkpoints; during the step they must not change, since log-probabilities would.
        """


def splits_values(policy: object) -> bool:
    """Return whether a rollout may call `act` and `values` of a policy in place of `predict`.

    `act(obs, mode)` returns what `predict` does without prev_values, and `values(obs)` returns those. While the simulators make the actions
    there is time for the values. It may not where a subclass has another `predict` or other `networks` than the class with `act`.
    """
    for kind in type(policy).__mro__:
        if "act" in vars(kind) and "values" in vars(kind):
            return True
        if {"predict", "networks", "act", "values"} & vars(kind).keys():
            return False
    return False


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Return a linear layer with orthogonal weights and no bias at first, the usual start of PPO."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def evaluation_scale(train: float, evaluation: float) -> float:
    """Return `eval_scale` of `sample_discrete` for logits that the temperature of training has divided already; 0 if `evaluation` is 0.

    Raises ValueError unless the temperature of training is positive and that of evaluations is not negative.
    """
    if not (train > 0 and evaluation >= 0):
        raise ValueError(
            f"temperature_train must be above 0 and temperature_eval at least 0, got {train:g} and {evaluation:g}; correct them"
        )
    return train / evaluation if evaluation else 0.0


def sample_discrete(logits: Tensor, mode: Mode, *, eval_scale: float = 0.0) -> tuple[Tensor, Tensor]:
    """Choose one of V classes by each row of `logits` [..., V]. Return the chosen classes [...] int64 and their log-probabilities [...].

    Mode "train" samples from the softmax of the logits. Mode "eval" takes the most likely class; if `eval_scale` is not 0, it samples from
    the softmax of the logits multiplied by it. The log-probabilities are those of `logits` as they are given, in both modes.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    if mode == "train" or eval_scale:
        # The largest of log-probabilities with Gumbel noise is a sample of the distribution.
        noise = torch.empty_like(log_probs).exponential_().log_()
        chosen = ((log_probs if mode == "train" else log_probs * eval_scale) - noise).argmax(dim=-1, keepdim=True)
    else:
        chosen = log_probs.argmax(dim=-1, keepdim=True)
    return chosen.squeeze(-1), log_probs.gather(-1, chosen).squeeze(-1)


def discrete_scores(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and the entropies [...] of the classes `chosen` [...] under `logits` [..., V]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, chosen[..., None])[..., 0], entropy
