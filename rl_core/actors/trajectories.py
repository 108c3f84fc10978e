"""Turns the trajectories of a step into training rows: masks, advantages, returns and the inputs of the policy.

Legend: N decisions of a trajectory, B simulators of all rollout epochs, C actions of a chunk, D tokens of an action, R rows = B * N,
S numbers of a row that the loss sees.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.fsdp.policy import by_level
from rl_core.actors.preparation import PreparedBatch
from rl_core.algorithms.advantages import AdvantageInputs, compute_advantages, embodied_loss_mask, episode_scores
from rl_core.algorithms.losses.critic import explained_variance
from rl_core.algorithms.stats import Stat, mean_stat
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.embodied import EmbodiedOptions, simulators_per_group
from rl_core.api.records import Trajectory
from rl_core.batching.collate import TrainingBatch

Reduce = Callable[[Tensor], Tensor] | None


def trained_mask(trajectory: Trajectory, options: EmbodiedOptions) -> Tensor:
    """Return [B, N, C] bool: the actions of the policy that were made, in episodes that were not lost and had not ended.

    Actions that a person took are left out. If the policy ratio is computed for whole chunks, a chunk with such an action is left out.
    """
    width = trajectory.rewards.shape[2]
    executed = torch.arange(width) < trajectory.sub_steps.transpose(0, 1)[..., None]
    mask = executed & trajectory.valid.transpose(0, 1)[..., None]
    if not options.auto_reset:
        mask &= embodied_loss_mask(trajectory.dones.transpose(0, 1))[0]
    if trajectory.intervene_flags is not None:
        interventions = trajectory.intervene_flags.transpose(0, 1)
        mask &= ~(interventions.any(dim=2, keepdim=True) if options.log_prob_level == "chunk" else interventions)
    return mask


def prepare_rows(
    trajectory: Trajectory,
    algorithm: AlgorithmSpec,
    options: EmbodiedOptions,
    *,
    version: int = 0,
    reduce: Reduce = None,
) -> PreparedBatch:
    """Return the rows of a step, one per decision, with advantages and, with a critic, returns.

    `version` is that of the weights in training; `reduce` sums a tensor over the data ranks.
    """
    rewards, dones = trajectory.rewards.transpose(0, 1), trajectory.dones.transpose(0, 1)
    mask_BNC = trained_mask(trajectory, options)
    passed, metrics = _filtered(rewards, dones, mask_BNC.any(dim=2).any(dim=1), algorithm, options)
    if algorithm.critic_in_use is None and trajectory.intervene_flags is not None:
        passed &= ~trajectory.intervene_flags.any(dim=0).any(dim=1)  # such a return is not the policy's alone
    mask_BNC &= passed[:, None, None]
    decided_BN = mask_BNC.any(dim=2)
    values = trajectory.prev_values.transpose(0, 1)[..., 0].contiguous()
    critic = algorithm.critic_in_use
    shared: dict[str, Any] = {"clip": algorithm.advantage_clip, "whiten": algorithm.whiten, "reduce": reduce}
    if critic is not None:
        inputs = AdvantageInputs(mask=decided_BN, rewards=rewards, dones=dones, values=values)
        result = compute_advantages("embodied_gae", inputs, gamma=critic.gamma, lam=critic.lam, level="chunk", **shared)
        # A rank without simulators has no returns; the others wait for it in the reduction.
        returns = torch.zeros_like(result.advantages) if result.returns is None else result.returns
    else:
        groups = trajectory.env_ids // algorithm.group_size
        inputs = AdvantageInputs(
            mask=decided_BN,
            group_ids=groups,
            valid=passed & decided_BN.any(dim=1),
            rewards=episode_scores(rewards, dones),
        )
        result = compute_advantages(algorithm.name, inputs, **shared)
        returns = None
    rollout_log_probs = by_level(_rows(trajectory.prev_logprobs), options.log_prob_level)
    mask = _level_mask(mask_BNC, trajectory.prev_logprobs.shape[-1], options.log_prob_level)
    metrics |= result.metrics

    def per_token(values_BN: Tensor) -> Tensor:
        return values_BN.reshape(-1, 1).expand_as(rollout_log_probs).contiguous()

    prepared = PreparedBatch(
        collated=(batch := _batch(trajectory, mask, rollout_log_probs)),
        batch=batch,
        advantages=per_token(result.advantages),
        metrics=metrics,
        inputs={name: _rows(tensor) for name, tensor in trajectory.forward_inputs.items()},
    )
    if critic is not None and returns is not None:
        prepared.values, prepared.returns = per_token(values[:, :-1]), per_token(returns)
        explained = explained_variance(values[:, :-1].contiguous(), returns, decided_BN, reduce=reduce)
        metrics["explained_variance"] = Stat("mean", torch.tensor(explained), torch.tensor(1.0))
    if algorithm.needs_ages:
        ages = (version - trajectory.versions).clamp(min=0).float()
        prepared.ages = per_token(ages[None].expand(rewards.shape[0], -1))
    return prepared


def _filtered(
    rewards: Tensor, dones: Tensor, valid: Tensor, algorithm: AlgorithmSpec, options: EmbodiedOptions
) -> tuple[Tensor, dict[str, Stat]]:
    """Return (passed, metrics). `passed` [B] says which simulators are in a group that passes the reward filter; all are without a filter.

    `rewards` is [B, N, C] and `dones` [B, N + 1, C]. `valid` [B] marks the episodes that count: those with an action that is trained on. The
    score of a group is the mean sum of rewards of its valid episodes, 0 if it has none. The metric `groups/filtered` is the share of valid
    episodes in groups that do not pass.
    """
    if options.reward_filter is None:
        return torch.ones_like(valid), {}
    low, high = options.reward_filter
    scores = episode_scores(rewards, dones)
    size = simulators_per_group(algorithm)
    counts = valid.reshape(-1, size).sum(dim=1)
    means = torch.where(valid, scores, 0.0).reshape(-1, size).sum(dim=1) / counts.clamp(min=1)
    passed = ((means >= low) & (means <= high)).repeat_interleave(size)
    return passed, {"groups/filtered": mean_stat((~passed).float(), valid)}


def _level_mask(mask_BNC: Tensor, tokens: int, level: str) -> Tensor:
    """Return the mask of actions as [R, S]. `tokens` is D, and `level` is env.options.logProbLevel."""
    rows = mask_BNC.flatten(0, 1)
    if level == "chunk":
        return rows.any(dim=1, keepdim=True)
    return rows if level == "action" else rows.repeat_interleave(tokens, dim=1)


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor [N, B, ...] as rows [B * N, ...], simulator by simulator."""
    return tensor.transpose(0, 1).flatten(0, 1).contiguous()


def _batch(trajectory: Trajectory, mask: Tensor, log_probs: Tensor) -> TrainingBatch:
    """Return the rows in the form that the training step takes. Each simulator is a group of its own in it."""
    steps, simulators = trajectory.rewards.shape[:2]
    rows, width = mask.shape
    texts = [f"simulator {number}" for number in trajectory.env_ids.tolist()]
    groups = torch.arange(simulators).repeat_interleave(steps)
    return TrainingBatch(
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        position_ids=torch.zeros(rows, width, dtype=torch.int64),
        lengths=torch.full((rows,), width),
        prompt_lengths=torch.zeros(rows, dtype=torch.int64),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        versions=trajectory.versions.repeat(simulators)[:, None].expand(rows, width),
        rewards=(rewards := trajectory.rewards.transpose(0, 1).sum(dim=2).flatten()),
        raw_rewards=rewards,
        reward_components={},
        group_ids=groups,
        group_texts=texts,
        sample_ids=[text for text in texts for _ in range(steps)],
        truncated=torch.zeros(rows, dtype=torch.bool),
        valid=mask.any(dim=1),
        sample_mask=mask.any(dim=1),
    )
