"""Advantages and helpers for policies that act in chunks of sub-steps (vision-language-action).

Legend: B rows (environments), N action chunks, C sub-steps of a chunk, K actions, D tokens or dimensions of an action.
"""

import torch
from torch import Tensor

from rl_core.algorithms.advantages.gae import check_discounts
from rl_core.algorithms.advantages.recurrence import decayed_suffix_sums
from rl_core.algorithms.advantages.types import AdvantageResult
from rl_core.algorithms.arguments import require_bool, require_choice, require_float32

LEVELS = ("chunk", "action")
LOG_PROB_LEVELS = ("token", "action", "chunk")


def embodied_gae_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, *, gamma: float = 0.99, lam: float = 0.95, level: str = "chunk"
) -> AdvantageResult:
    """Return advantages and returns of every step, float32: [B, N] for chunks, [B, N * C] for actions.

    `rewards` is [B, N, C]. `dones` is [B, N + 1, C] bool; index 0 of dimension 1 is the state before the first chunk. `values` is [B, N +
    1] for chunks or [B, N * C + 1] for actions; its last entry is the bootstrap value. The reward of a chunk is the sum over its sub-steps;
    a chunk is done if any of them is. A done stops bootstrapping and the lambda trace. Nothing is masked: combine with
    `embodied_loss_mask`. Source: as `gae_advantages`.
    """
    check_discounts(gamma, lam)
    require_float32(values=values)
    _check_trajectory(rewards, dones)
    step_rewards, step_dones = _by_step(rewards.detach().double(), dones[:, 1:], level)
    if values.shape != (step_rewards.shape[0], step_rewards.shape[1] + 1):
        expected = (step_rewards.shape[0], step_rewards.shape[1] + 1)
        raise ValueError(
            f"values must have shape {expected} for rewards {tuple(rewards.shape)}, got {tuple(values.shape)}"
        )
    values64 = values.detach().double()
    not_done = (~step_dones).double()
    deltas = step_rewards + gamma * values64[:, 1:] * not_done - values64[:, :-1]
    sums = decayed_suffix_sums(deltas, gamma * lam * not_done)
    advantages, returns = sums.float(), (sums + values64[:, :-1]).float()
    return AdvantageResult(advantages, returns)


def embodied_loss_mask(dones: Tensor, *, level: str = "action") -> tuple[Tensor, Tensor]:
    """Return (mask, number of trainable steps per row [B] int64), where steps up to the first done of a row, inclusive, are trainable.

    `dones` is [B, N + 1, C] bool; index 0 of dimension 1 is the state before the first chunk (a done there masks everything). The mask is
    [B, N, C], or [B, N, 1] for chunks, where a chunk that starts undone is trained.
    """
    require_bool(dones=dones)
    require_choice("level", level, LEVELS)
    rows, steps = dones.shape[:2]
    before_first = dones[:, 0].any(dim=1, keepdim=True)
    marks = dones[:, 1:] if level == "action" else dones[:, 1:].any(dim=2, keepdim=True)
    flat = torch.cat((before_first, marks.reshape(rows, (steps - 1) * marks.shape[2])), dim=1)
    mask = (flat.long().cumsum(dim=1) == 0)[:, :-1].reshape(rows, steps - 1, marks.shape[2])
    return mask, mask.flatten(1).sum(dim=1)


def episode_scores(rewards: Tensor, dones: Tensor) -> Tensor:
    """Return [B] float32: the undiscounted sum of `rewards` [B, N, C] up to each row's first done."""
    _check_trajectory(rewards, dones)
    mask, _ = embodied_loss_mask(dones)
    return torch.where(mask, rewards.detach().double(), 0.0).flatten(1).sum(dim=1).float()


def action_log_probs(log_probs: Tensor, *, action_dim: int, level: str) -> Tensor:
    """Return `log_probs` [B, K * D] per `token` [B, K, D], per `action` (sum over D) [B, K] or per `chunk` (sum) [B].

    Raises ValueError when K * D is not divisible by `action_dim` D.
    """
    require_float32(log_probs=log_probs)
    require_choice("level", level, LOG_PROB_LEVELS)
    rows, width = log_probs.shape
    if action_dim < 1 or width % action_dim:
        raise ValueError(f"log_probs must have a width divisible by action_dim, got {width} and {action_dim}")
    per_token = log_probs.reshape(rows, width // action_dim, action_dim)
    if level == "token":
        return per_token
    return per_token.sum(dim=2) if level == "action" else per_token.sum(dim=(1, 2))


def _check_trajectory(rewards: Tensor, dones: Tensor) -> None:
    require_bool(dones=dones)
    if rewards.dim() != 3 or dones.shape != (rewards.shape[0], rewards.shape[1] + 1, rewards.shape[2]):
        raise ValueError(
            f"rewards [B, N, C] and dones [B, N + 1, C] must fit, got {tuple(rewards.shape)} and {tuple(dones.shape)}"
        )


def _by_step(rewards: Tensor, dones: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Return rewards and dones [B, steps], a step being a chunk or a single action."""
    require_choice("level", level, LEVELS)
    if level == "action":
        return rewards.flatten(1), dones.flatten(1)
    return rewards.sum(dim=2), dones.any(dim=2)
