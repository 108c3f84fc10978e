"""Rows between tensors and lists: the interface of generation pads to the right, engines and message logs hold no padding.

request [B, S] --prompts_of--> lists of ids -> engine -> GenerationOutput --batch_of--> answer [B, S'] --generated--> one row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_core.api.records import FinishReason
from rl_core.rollouts.generation import BatchedDataDict
from rl_core.rollouts.message_log import as_token_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """What one prompt became."""

    ids: list[int]
    """Generated ids, the one that ended the row included."""
    logprobs: list[float]
    """Per id, of softmax(logits / temperature) over the whole vocabulary."""
    finish_reason: str
    """stop, length (max_new_tokens) or seq_limit (max_seq_len)."""
    versions: list[tuple[int, int, int]]
    """(start, end, version of the weights) ranges over `ids`."""


def prompts_of(data: Mapping[str, Any], pad_id: int, *, pad_is_content: bool) -> list[list[int]]:
    """Return the ids of every row of a request without padding.

    `pad_is_content`: prompts may hold `pad_id` (it ends sequences too). Raises ValueError for padding on the left or inside
    and for a length that the row does not have.
    """
    lengths = torch.as_tensor(data["input_lengths"]).tolist()
    prompts = []
    for row, (ids, length) in enumerate(zip(torch.as_tensor(data["input_ids"]).tolist(), lengths, strict=True)):
        if not 0 <= length <= len(ids):
            raise ValueError(
                f"input_lengths must be in [0, {len(ids)}], the width of input_ids, got {length} in row {row}"
            )
        prompt, rest = ids[:length], ids[length:]
        stray = any(token != pad_id for token in rest) or (bool(rest) and not pad_is_content and pad_id in prompt)
        if stray:
            raise ValueError(
                f"input_ids must be right-padded with {pad_id}: row {row} of {length} tokens has padding on the left "
                "or inside; move it to the right"
            )
        prompts.append(prompt)
    return prompts


def batch_of(prompts: Sequence[list[int]], outputs: Sequence[GenerationOutput], pad_id: int) -> BatchedDataDict:
    """Return what became of `prompts` in the interface's shape, right-padded to the longest row."""
    totals = [len(prompt) + len(output.ids) for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(totals, default=0)
    ids, logprobs = [], []
    for prompt, output, total in zip(prompts, outputs, totals, strict=True):
        ids.append(prompt + output.ids + [pad_id] * (width - total))
        logprobs.append([0.0] * len(prompt) + output.logprobs + [0.0] * (width - total))
    reasons = [output.finish_reason for output in outputs]
    return BatchedDataDict(
        {
            "output_ids": torch.tensor(ids, dtype=torch.int64).view(len(ids), width),
            "generation_lengths": torch.tensor([len(output.ids) for output in outputs], dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.int64),
            "logprobs": torch.tensor(logprobs, dtype=torch.float32).view(len(logprobs), width),
            "truncated": torch.tensor([FinishReason(reason).truncated for reason in reasons], dtype=torch.bool),
            "finish_reasons": reasons,
            "policy_versions": [output.versions for output in outputs],
        }
    )


def generated(answer: Mapping[str, Any], start: int) -> tuple[Tensor, Tensor]:
    """Return ids [n] int64 and log-probabilities [n] float32 that the first row of `answer` has from token `start` on."""
    end = int(answer["unpadded_sequence_lengths"][0])
    ids = as_token_tensor(answer["output_ids"][0, start:end])
    return ids, torch.as_tensor(answer["logprobs"][0, start:end]).to(torch.float32)
