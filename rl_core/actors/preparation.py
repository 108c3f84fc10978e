"""Prepares prompt groups for the loss: shapes rewards, applies filters to masks, computes advantages and importance weights.

Legend: B completions of this rank, S padded width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.rows import Columns
from rl_core.actors.teachers import TeacherScores
from rl_core.algorithms.advantages import AdvantageInputs, compute_advantages
from rl_core.algorithms.advantages.reinforce import token_rewards
from rl_core.algorithms.filtering import down_sample, overlong_filter, sequence_error_mask
from rl_core.algorithms.losses.critic import explained_variance
from rl_core.algorithms.losses.importance import importance_weights
from rl_core.algorithms.rewards import scale_rewards, shape_overlong, shape_stop_properly
from rl_core.algorithms.stats import Stat
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch, collate_groups

Reduce = Callable[[Tensor], Tensor]


@dataclass(kw_only=True, slots=True)
class PreparedBatch:
    """The completions of a rank in a step, with their log-probabilities, advantages and other values that are computed before training."""

    collated: TrainingBatch
    """The batch as received: raw rewards, and masks that select every generated token."""
    batch: TrainingBatch
    """The batch that is trained: `prepare_for_loss` shaped its rewards and applied the filters to its masks."""
    old_log_probs: Tensor | None = None
    """[B, S] log-probabilities of the policy before the update if they are recomputed; otherwise the rollout's are used."""
    ref_log_probs: Tensor | None = None
    """[B, S] log-probabilities of the reference policy if a KL to it is used."""
    teacher: TeacherScores | None = None
    """What the teachers say of the tokens in on-policy distillation."""
    values: Tensor | None = None
    """[B, S] values of the critic before the update if there is one."""
    weights: Tensor | None = None
    """[B, S] importance weights."""
    advantages: Tensor | None = None
    """[B, S] advantages."""
    returns: Tensor | None = None
    """[B, S] targets of the critic."""
    ages: Tensor | None = None
    """[B, S] number of versions by which the policy that sampled a token is older than the trainer's; None if not needed."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """Metrics of rewards, groups and advantages by name."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [B, ...]: what a policy that is no language model takes in place of tokens; see `StepRows`."""

    def columns(self, *, decoupled: bool = False) -> Columns:
        """Return the columns of the training rows.

        `decoupled` selects the naming of decoupled PPO: the old policy is then the one that sampled (behaviour policy), and the policy
        before this update is the proximal one. Otherwise the old policy is the one before this update, or the sampling policy if its
        log-probabilities are not recomputed.
        """
        return Columns(
            input_ids=self.batch.input_ids,
            loss_mask=self.batch.loss_mask,
            old_log_probs=self.batch.rollout_log_probs
            if decoupled or self.old_log_probs is None
            else self.old_log_probs,
            advantages=self.advantages,
            weights=self.weights,
            ref_log_probs=self.ref_log_probs,
            proximal_log_probs=self.old_log_probs if decoupled else None,
            rollout_log_probs=None if decoupled or self.old_log_probs is None else self.batch.rollout_log_probs,
            ages=self.ages,
            values=self.values,
            returns=self.returns,
            candidates=None if self.teacher is None else self.teacher.candidates,
            teacher_log_probs=None if self.teacher is None else self.teacher.candidate_log_probs,
        )


def collate(
    records: Sequence[PromptGroupRecord], *, max_length: int, micro_batch_tokens: int, version: int | None = None
) -> PreparedBatch:
    """Return the records as a batch.

    `version` is that of the trainer's weights, from which the ages of tokens are computed; None when they are not needed. Raises DataError
    naming a sample that is malformed or too long.
    """
    batch = collate_groups(records, pad_token_id=0, max_length=max_length)
    longest = int(batch.lengths.argmax()) if len(batch) else None
    if longest is not None and batch.lengths[longest] > micro_batch_tokens:
        raise DataError(
            f"actor.microBatchTokens must hold the longest row, got {micro_batch_tokens} and {batch.lengths[longest]} tokens in sample "
            f"{batch.sample_ids[longest]}; raise it, or bound rollout.maxSequenceLength"
        )
    ages = None if version is None else (version - batch.versions).clamp(min=0).float()
    return PreparedBatch(collated=batch, batch=batch, ages=ages)


def prepare_for_loss(
    prepared: PreparedBatch, algorithm: AlgorithmSpec, *, max_new_tokens: int, reduce: Reduce | None
) -> None:
    """Shape rewards, apply filters, and compute importance weights and advantages, in place.

    `max_new_tokens` is the response limit of a row, and `reduce` sums a tensor over the data ranks (None for one rank). The metrics
    `advantages/*` are computed after clipping and whitening. The function starts from the collated batch, so a second call changes nothing.
    """
    prepared.batch = _shape_rewards(prepared.collated, algorithm, max_new_tokens)
    _correct_mismatch(prepared, algorithm)
    batch = prepared.batch
    inputs = AdvantageInputs(
        mask=batch.loss_mask,
        group_ids=batch.group_ids,
        valid=batch.valid,
        rewards=batch.rewards,
        reward_components=_complete(batch) if algorithm.name == "gdpo" else batch.reward_components,
        log_probs=batch.rollout_log_probs if prepared.old_log_probs is None else prepared.old_log_probs,
        ref_log_probs=prepared.ref_log_probs,
        teacher_log_probs=None if prepared.teacher is None else prepared.teacher.log_probs,
        values=prepared.values,
    )
    coefficient, critic = algorithm.reward_kl_coefficient, algorithm.critic_in_use
    options = {"kl_coefficient": coefficient} if coefficient > 0 else {}
    if critic is not None:
        inputs, kl_metrics = _with_token_rewards(inputs, coefficient)
        prepared.metrics |= kl_metrics
        options = {"gamma": critic.gamma, "lam": critic.lam}
    if algorithm.distillation is not None:
        distillation = algorithm.distillation
        options = {"reward_weight": distillation.reward_weight, "teacher_in_loss": distillation.top_k is not None}
    result = compute_advantages(
        algorithm.name, inputs, clip=algorithm.advantage_clip, whiten=algorithm.whiten, reduce=reduce, **options
    )
    prepared.advantages = result.advantages
    prepared.metrics |= result.metrics
    if critic is not None and prepared.values is not None:
        # A rank left without groups has no returns; the others wait for it in the reduction.
        prepared.returns = torch.zeros_like(prepared.values) if result.returns is None else result.returns
        explained = explained_variance(prepared.values, prepared.returns, batch.loss_mask, reduce=reduce)
        prepared.metrics["explained_variance"] = Stat("mean", torch.tensor(explained), torch.tensor(1.0))


def _complete(batch: TrainingBatch) -> dict[str, Tensor]:
    """Return the rewards by name, of which each valid sample has all. Raises DataError for a sample that lacks one of them."""
    for name, rewards in batch.reward_components.items():
        if lacking := (batch.valid & rewards.isnan()).nonzero().flatten().tolist():
            raise DataError(
                f"sample {batch.sample_ids[lacking[0]]} must have the reward {name!r} as others of its step have, got none; "
                "have the environment give all of them, or None for the row"
            )
    return batch.reward_components


def _with_token_rewards(inputs: AdvantageInputs, kl_coefficient: float) -> tuple[AdvantageInputs, dict[str, Stat]]:
    """Return the inputs of an estimator that takes a reward per token, and the metric of the KL in it."""
    assert inputs.rewards is not None
    rewards, metrics = token_rewards(
        inputs.rewards,
        inputs.mask,
        log_probs=inputs.log_probs,
        ref_log_probs=inputs.ref_log_probs,
        kl_coefficient=kl_coefficient,
    )
    return replace(inputs, token_rewards=rewards), metrics


def _shape_rewards(batch: TrainingBatch, algorithm: AlgorithmSpec, max_new_tokens: int) -> TrainingBatch:
    """Apply scale, overlong penalty, stop-properly, the overlong filter and the choice of rows, in this order."""
    rewards, overlong, scale = batch.rewards, algorithm.overlong, algorithm.reward_scale
    if scale is not None:
        rewards = scale_rewards(rewards, **scale.model_dump())
    if overlong.buffer is not None:
        generated = batch.loss_mask.sum(dim=1)
        rewards = shape_overlong(
            rewards,
            generated,
            max_length=max_new_tokens,
            buffer=overlong.buffer,
            penalty=overlong.penalty,
            cap=overlong.penalty_cap,
        )
    if overlong.stop_properly_coefficient is not None:
        rewards = shape_stop_properly(rewards, batch.truncated, coefficient=overlong.stop_properly_coefficient)
    valid, sample_mask = batch.valid, batch.sample_mask
    if overlong.filter:
        valid, selected = overlong_filter(batch.valid, batch.truncated, keep_in_baseline=overlong.keep_in_baseline)
        sample_mask = sample_mask & selected
    if algorithm.keep_per_group is not None:
        selected = down_sample(rewards, batch.group_ids, keep=algorithm.keep_per_group, valid=valid & sample_mask)
        valid, sample_mask = valid & selected, sample_mask & selected
    return _masked(replace(batch, rewards=rewards, valid=valid), sample_mask)


def _correct_mismatch(prepared: PreparedBatch, algorithm: AlgorithmSpec) -> None:
    """Compare recomputed with sampled log-probabilities: mask rows that differ too much and compute importance weights of the others."""
    batch, recomputed = prepared.batch, prepared.old_log_probs
    if recomputed is None:
        return
    if algorithm.sequence_error_threshold is not None:
        within_threshold = sequence_error_mask(
            batch.rollout_log_probs, recomputed, batch.loss_mask, threshold=algorithm.sequence_error_threshold
        )
        prepared.batch = batch = _masked(batch, batch.sample_mask & within_threshold)
    if algorithm.importance is not None:
        options: dict[str, Any] = algorithm.importance.model_dump()
        prepared.weights, metrics = importance_weights(recomputed, batch.rollout_log_probs, batch.loss_mask, **options)
        prepared.metrics |= metrics


def _masked(batch: TrainingBatch, sample_mask: Tensor) -> TrainingBatch:
    return replace(batch, sample_mask=sample_mask, loss_mask=batch.loss_mask & sample_mask[:, None])
