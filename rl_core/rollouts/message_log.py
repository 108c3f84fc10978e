"""The loss mask of a message log, and the prompt that several logs have in common.

Invariants: the concatenated `token_ids` of a message log are the model's input, and only tokens that the policy sampled can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.api.records import Completion


def as_token_tensor(ids: Any) -> Tensor:
    """Return `ids` (tensor, array or list, possibly empty or [1, T]) as a 1-D int64 tensor."""
    # Copied, because arrays that were received are read-only.
    tensor = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    return tensor.reshape(-1).to(torch.int64)


def token_loss_mask(log: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the loss mask of a log of T tokens, [T] int64: 1 for tokens that are trained on.

    These are the tokens of assistant messages with `generation_logprobs`, where the message's own `token_loss_mask`, if any, is 1. Raises
    DataError if a column of a message with a value per token differs in length from its ids.
    """
    parts = [_mask_of(message, f"message {index}") for index, message in enumerate(log)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def common_prefix(completions: Sequence[Completion]) -> Tensor:
    """Return the ids [T] int64 that the first messages of all `completions` begin with."""
    prompts = [as_token_tensor(completion.message_log[0]["token_ids"]) for completion in completions]
    length = min(len(ids) for ids in prompts)
    is_common = torch.stack([ids[:length] for ids in prompts]).eq(prompts[0][:length]).all(dim=0)
    return prompts[0][: int(is_common.long().cumprod(dim=0).sum())]


def _mask_of(message: Mapping[str, Any], location: str) -> Tensor:
    ids = torch.as_tensor(message["token_ids"])
    columns = {key: torch.as_tensor(value) for key, value in message.items() if _per_token(key, value)}
    for key, column in columns.items():
        if column.shape[:1] != ids.shape[:1]:
            raise DataError(
                f"{location}: {key} must have one entry per token, {len(ids)}, got shape {list(column.shape)}; "
                "store ids, log-probabilities and masks of one generation together"
            )
    if message["role"] != "assistant" or "generation_logprobs" not in columns:
        return torch.zeros(len(ids), dtype=torch.int64)
    mask = columns.get("token_loss_mask")
    return torch.ones(len(ids), dtype=torch.int64) if mask is None else mask.to(torch.int64)


def _per_token(key: str, value: Any) -> bool:
    """Return whether an entry of a message has a value per token: every array, and log-probabilities and mask even as lists."""
    return hasattr(value, "dtype") or (key in ("generation_logprobs", "token_loss_mask") and value is not None)
