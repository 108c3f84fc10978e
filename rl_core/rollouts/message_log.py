"""Message logs as tensors: the loss mask of a log, and the logs of a batch as padded rows.

Invariants: the concatenated `token_ids` of a message log are the model's input, and only tokens that the policy sampled can be trained on.

Legend: B logs, S longest log, T tokens of one log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import DataError


def as_token_tensor(ids: Any) -> Tensor:
    """Return `ids` (tensor, array or list, possibly empty or [1, T]) as a 1-D int64 tensor."""
    tensor = ids if isinstance(ids, Tensor) else torch.tensor(ids)  # copied: arrays off the wire are read-only
    return tensor.reshape(-1).to(torch.int64)


def token_loss_mask(log: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the loss mask of a log, [T] int64: 1 for tokens that are trained on.

    These are the tokens of assistant messages with `generation_logprobs`, where the message's own `token_loss_mask`, if any, is 1. Raises
    DataError if log-probabilities or mask of a message differ in length from its ids.
    """
    parts = [_tensors(message, f"message {index}")["token_loss_mask"] for index, message in enumerate(log)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def flatten_messages(
    logs: Sequence[Sequence[Mapping[str, Any]]], pad_id: int, divisor: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every tensor key of B logs as [B, S], right-padded, and the lengths [B] int32.

    S is the length of the longest log, rounded up to a multiple of `divisor`. `token_ids` is padded with `pad_id`, other keys with 0;
    missing log-probabilities are float32 zeros. Raises RuntimeError if the tensors of a key differ in dtype or device, DataError if a
    tensor of a message differs in length from its ids.
    """
    rows = [[_tensors(message, f"log {r}, message {m}") for m, message in enumerate(log)] for r, log in enumerate(logs)]
    keys = dict.fromkeys(key for row in rows for message in row for key in message)
    like = {key: _common(key, [message[key] for row in rows for message in row if key in message]) for key in keys}
    lengths = torch.tensor([sum(len(m["token_ids"]) for m in row) for row in rows], dtype=torch.int32)
    longest = int(lengths.max()) if len(lengths) else 0
    width = -(-longest // divisor) * divisor
    flat: dict[str, Tensor] = {}
    for key in keys:
        fill = pad_id if key == "token_ids" else 0
        out = torch.full((len(rows), width), fill, dtype=like[key].dtype, device=like[key].device)
        for index, row in enumerate(rows):
            parts = [m[key] if key in m else out.new_zeros(len(m["token_ids"])) for m in row]
            if parts:
                joined = torch.cat(parts)
                out[index, : len(joined)] = joined
        flat[key] = out
    return flat, lengths


def _tensors(message: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the tensors of a message with one entry per token, always including log-probabilities and loss mask."""
    ids = torch.as_tensor(message["token_ids"])
    if not ids.numel() and ids.is_floating_point():
        ids = ids.to(torch.int64)
    tensors = {key: torch.as_tensor(value) for key, value in message.items() if _per_token(key, value)}
    tensors["token_ids"] = ids
    for key, tensor in tensors.items():
        if tensor.shape[:1] != ids.shape[:1]:
            raise DataError(
                f"{where}: {key} must have one entry per token, {len(ids)}, got shape {list(tensor.shape)}; "
                "store ids, log-probabilities and masks of one generation together"
            )
    sampled = message["role"] == "assistant" and "generation_logprobs" in tensors
    mask = torch.full(ids.shape, int(sampled), dtype=torch.int64, device=ids.device)
    if sampled and "token_loss_mask" in tensors:
        mask = tensors["token_loss_mask"].to(mask)
    tensors["token_loss_mask"] = mask
    tensors.setdefault("generation_logprobs", torch.zeros(len(ids), dtype=torch.float32, device=ids.device))
    return tensors


def _per_token(key: str, value: Any) -> bool:
    """Return whether an entry of a message has a value per token: every array, and log-probabilities and mask even as lists."""
    return hasattr(value, "dtype") or (key in ("generation_logprobs", "token_loss_mask") and value is not None)


def _common(key: str, tensors: Sequence[Tensor]) -> Tensor:
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        got = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise RuntimeError(f"{key} must have one dtype and device over a batch of logs, got {got}; convert first")
    return tensors[0]
