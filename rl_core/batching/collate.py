"""Prompt groups as tensors: one row per completion.

Legend: B completions, S tokens of the padded row. Token ids are concatenated as the messages hold them, never made again
from text. Failed completions become rows that train nothing and enter no statistic; their reward stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.api.records import Completion, FinishReason, PromptGroupRecord
from rl_core.batching.rows import Row, read_row

_COMPONENT = "reward/"
"""Prefix of a completion's metrics that are components of its reward (the rollout manager writes them)."""
_LARGEST_REWARD = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """B completions as tensors. Later stages replace `loss_mask`, `sample_mask` and `rewards` by `dataclasses.replace`."""

    input_ids: Tensor
    """[B, S] int64; pad_token_id on padding."""
    attention_mask: Tensor
    """[B, S] bool, true on real tokens."""
    position_ids: Tensor
    """[B, S] int64."""
    loss_mask: Tensor
    """[B, S] bool, true on tokens that train; false in rows whose sample_mask is false."""
    rollout_log_probs: Tensor
    """[B, S] float32, token-aligned; 0 off the mask."""
    versions: Tensor
    """[B, S] int64, policy version that made the token; -1 off the mask."""
    rewards: Tensor
    """[B] float32, finished rewards: raw ones until the actor scales and shapes them."""
    raw_rewards: Tensor
    """[B] float32, as the environment gave them; NaN for a failed completion."""
    reward_components: dict[str, Tensor]
    """Name -> [B] float32; NaN where a completion has no such component."""
    group_ids: Tensor
    """[B] int64 codes of the groups, numbered in the order of their first row; `group_texts` has the group ids."""
    valid: Tensor
    """[B] bool, the reward can be trusted."""
    sample_mask: Tensor
    """[B] bool, the row may train."""
    truncated: Tensor
    """[B] bool, generation was cut."""
    lengths: Tensor
    """[B] int64, real tokens of prompt and response."""
    prompt_lengths: Tensor
    """[B] int64, real tokens of the prompt."""
    sample_ids: list[str]
    """[B] `{group_id}_g{i}`."""
    group_texts: list[str]
    """Text id of each group code."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def take(self, rows: Sequence[int]) -> TrainingBatch:
        """Return the batch of `rows`, in that order. `group_texts` is unchanged, so the codes in `group_ids` keep their meaning."""
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.input_ids.device)
        changed: dict[str, Any] = {
            field.name: value[index] for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)
        }
        changed["reward_components"] = {name: value[index] for name, value in self.reward_components.items()}
        changed["sample_ids"] = [self.sample_ids[row] for row in rows]
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> TrainingBatch:
        """Return the batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        moved["reward_components"] = {name: value.to(device) for name, value in self.reward_components.items()}
        return replace(self, **moved)


def collate_groups(
    records: Sequence[PromptGroupRecord],
    *,
    pad_token_id: int,
    max_length: int,
) -> TrainingBatch:
    """Return all completions of `records` as one TrainingBatch, in order of records and completions.

    A token trains when its message has role `assistant` and carries `generation_logprobs` of equal length, narrowed by
    `token_loss_mask`. Rows are padded on the right with `pad_token_id` to the length S of the longest. Completions that failed (finish
    reason `error`, or a NaN reward) or have `loss_multiplier` 0 have `valid` and `sample_mask` false.
    Raises DataError naming the sample when it is longer than `max_length` tokens, its log-probabilities or masks do not fit its
    tokens, or its reward is not representable in float32.
    """
    samples, group_texts = _samples(records)
    rows = [read_row(sample.completion.message_log, sample.record, name=sample.name) for sample in samples]
    for sample, row in zip(samples, rows, strict=True):
        if row.length > max_length:
            raise DataError(
                f"sample {sample.name} must have at most {max_length} tokens (max_length), got {row.length}"
            )
    usable = torch.tensor([_usable(sample) for sample in samples], dtype=torch.bool)
    raw = torch.tensor([sample.completion.reward for sample in samples], dtype=torch.float32)
    tokens = _fill(rows, pad_token_id=pad_token_id, usable=usable)
    return TrainingBatch(
        **tokens,
        rewards=raw.clone(),
        raw_rewards=raw,
        reward_components=_components(samples),
        group_ids=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        valid=usable,
        sample_mask=usable.clone(),
        truncated=torch.tensor([bool(sample.completion.truncated) for sample in samples], dtype=torch.bool),
        lengths=torch.tensor([row.length for row in rows], dtype=torch.int64),
        prompt_lengths=torch.tensor([row.prompt_length for row in rows], dtype=torch.int64),
        sample_ids=[sample.name for sample in samples],
        group_texts=group_texts,
    )


def has_failed(completion: Completion) -> bool:
    """Return whether the sample ended in an error or got no reward, so that its reward says nothing."""
    return completion.finish_reason == FinishReason.ERROR or math.isnan(completion.reward)


@dataclass(frozen=True, slots=True)
class _Sample:
    record: PromptGroupRecord
    completion: Completion
    group: int
    name: str


def _samples(records: Sequence[PromptGroupRecord]) -> tuple[list[_Sample], list[str]]:
    """Return the completions with group codes and names; a record without a group id is a group of its own."""
    codes: dict[str, int] = {}
    sizes: list[int] = []
    samples: list[_Sample] = []
    for number, record in enumerate(records):
        text = record.group_id or f"record{number}-{record.prompt_idx}"
        group = codes.setdefault(text, len(codes))
        if group == len(sizes):
            sizes.append(0)
        for completion in record.completions:
            samples.append(_Sample(record, completion, group, f"{text}_g{sizes[group]}"))
            sizes[group] += 1
    return samples, list(codes)


def _usable(sample: _Sample) -> bool:
    """Return whether the row may train; a made-up or half-honoured value is refused."""
    completion = sample.completion
    if completion.loss_multiplier not in (0, 1):
        raise DataError(
            f"sample {sample.name}: loss_multiplier must be 0 (excluded) or 1, got {completion.loss_multiplier}; "
            "use loss weights for other factors"
        )
    if abs(completion.reward) > _LARGEST_REWARD:
        raise DataError(
            f"sample {sample.name}: reward must be within float32, +-{_LARGEST_REWARD:.2g}, or NaN for a failed sample, "
            f"got {completion.reward}"
        )
    return not has_failed(completion) and completion.loss_multiplier != 0


def _fill(rows: list[Row], *, pad_token_id: int, usable: Tensor) -> dict[str, Tensor]:
    """Return the [B, S] tensors; rows are padded on the right to the longest."""
    width = max((row.length for row in rows), default=0)
    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.full(shape, -1, dtype=torch.int64)
    ids_np, attention_np, mask_np = input_ids.numpy(), attention_mask.numpy(), loss_mask.numpy()
    log_probs_np, versions_np = log_probs.numpy(), versions.numpy()
    for index, row in enumerate(rows):
        span = slice(row.length)
        ids_np[index, span] = row.token_ids
        attention_np[index, span] = True
        if usable[index]:
            mask_np[index, span] = row.loss_mask
            log_probs_np[index, span] = row.log_probs
            versions_np[index, span] = row.versions
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": torch.arange(width).expand(shape).clone(),
        "loss_mask": loss_mask,
        "rollout_log_probs": log_probs,
        "versions": versions,
    }


def _components(samples: list[_Sample]) -> dict[str, Tensor]:
    """Return the metrics `reward/<name>` of the completions by name, in order of first appearance; NaN where absent."""
    components = [
        {
            key.removeprefix(_COMPONENT): value
            for key, value in sample.completion.metrics.items()
            if key.startswith(_COMPONENT)
        }
        for sample in samples
    ]
    names = dict.fromkeys(name for row in components for name in row)
    return {
        name: torch.tensor([float(row.get(name, math.nan)) for row in components], dtype=torch.float32)
        for name in names
    }
