"""Generalized advantage estimation over the trainable tokens of a row. Legend: B rows, T tokens."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.recurrence import decayed_suffix_sums, next_trainable
from rl_core.algorithms.advantages.types import AdvantageResult
from rl_core.algorithms.arguments import require_float32, require_rows, require_same_shape, require_token_mask


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> AdvantageResult:
    """Return advantages and returns (A + V) of the true tokens of `mask`, both [B, T] float32, 0 elsewhere.

    Masked tokens (tool output, padding) are skipped: the step after a token is the next trainable one, with one discount.
    `bootstrap_values` [B] is the value after the last token; None means 0. `values=None` (no critic) means V = 0 and needs gamma = lam = 1.
    Source: Schulman et al., "High-Dimensional Continuous Control" (2016), equation 16. Raises ValueError for other discounts without
    values, or discounts outside [0, 1].
    """
    check_discounts(gamma, lam)
    if values is None:
        if gamma != 1 or lam != 1:
            raise ValueError(
                f"gamma and lam must be 1 without values, got {gamma} and {lam}; pass values or set both to 1"
            )
        values = torch.zeros_like(token_rewards, dtype=torch.float32)
    require_token_mask(mask)
    require_float32(values=values)
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    rewards, masked_values = (torch.where(mask, tensor.detach().double(), 0.0) for tensor in (token_rewards, values))
    next_values = next_trainable(masked_values, mask, _after_last(bootstrap_values, mask))
    deltas = torch.where(mask, rewards + gamma * next_values - masked_values, 0.0)
    # A masked token passes on the sum of the tokens after it unchanged.
    sums = decayed_suffix_sums(deltas, torch.where(mask, gamma * lam, 1.0).double())
    advantages = torch.where(mask, sums, 0.0)
    return AdvantageResult(advantages.float(), (advantages + masked_values).float())


def check_discounts(gamma: float, lam: float) -> None:
    """Raise ValueError unless both are in [0, 1]."""
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")


def _after_last(bootstrap_values: Tensor | None, mask: Tensor) -> Tensor:
    if bootstrap_values is None:
        return torch.zeros(mask.shape[0], dtype=torch.float64, device=mask.device)
    require_rows("bootstrap_values", bootstrap_values, mask=mask)
    return bootstrap_values.detach().double()
