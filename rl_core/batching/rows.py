"""One completion's message log as flat token arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.api.errors import DataError
from rl_core.api.records import PromptGroupRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The T tokens of one completion."""

    token_ids: NDArray[np.int64]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], true on tokens that train."""
    log_probs: NDArray[np.float32]
    """[T], the rollout's; 0 off the mask."""
    versions: NDArray[np.int64]
    """[T], policy version; -1 off the mask."""
    prompt_length: int
    """Tokens of the record's prompt, which the log starts with."""

    @property
    def length(self) -> int:
        """Return T."""
        return len(self.token_ids)


def read_row(log: Sequence[Mapping[str, Any]], record: PromptGroupRecord, *, name: str) -> Row:
    """Return the concatenated tokens of `log`, a completion of `record`; `name` is for errors.

    Token fields may be torch tensors, numpy arrays or lists. Raises DataError when a message lacks `token_ids`, a field does
    not have one entry per token, versions do not cover all tokens, or the log is shorter than the prompt.
    """
    prompt_length = sum(len(_field(message, "token_ids", f"the prompt of {name}")) for message in record.prompt)
    parts = [_read_message(message, record, f"sample {name}, message {index}") for index, message in enumerate(log)]
    token_ids, loss_mask, log_probs, versions = (
        np.concatenate([part[column] for part in parts]) if parts else np.empty(0, dtype)
        for column, dtype in enumerate((np.int64, np.bool_, np.float32, np.int64))
    )
    if not parts:  # a completion that failed before its log was made
        token_ids = np.concatenate([np.asarray(m["token_ids"], np.int64) for m in record.prompt] or [token_ids])
        loss_mask, log_probs = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), -1, np.int64)
    if len(token_ids) < prompt_length:
        raise DataError(
            f"sample {name} must start with its prompt of {prompt_length} tokens, got {len(token_ids)} tokens"
        )
    return Row(
        token_ids=token_ids, loss_mask=loss_mask, log_probs=log_probs, versions=versions, prompt_length=prompt_length
    )


_Columns = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int64]]


def _read_message(message: Mapping[str, Any], record: PromptGroupRecord, where: str) -> _Columns:
    """Return token ids, loss mask, log-probabilities and versions of one message."""
    token_ids = np.asarray(_field(message, "token_ids", where), np.int64)
    count = len(token_ids)
    generation_log_probs = message.get("generation_logprobs")
    if message["role"] != "assistant" or generation_log_probs is None:
        return token_ids, np.zeros(count, np.bool_), np.zeros(count, np.float32), np.full(count, -1, np.int64)
    log_probs = _per_token(generation_log_probs, count, np.float32, "generation_logprobs", where)
    mask = np.ones(count, np.bool_)
    if message.get("token_loss_mask") is not None:
        mask = _per_token(message["token_loss_mask"], count, np.float32, "token_loss_mask", where) != 0
    versions = _versions(message, count, record.start_version, where)
    return token_ids, mask, np.where(mask, log_probs, np.float32(0)), np.where(mask, versions, -1)


def _versions(message: Mapping[str, Any], count: int, default: int, where: str) -> NDArray[np.int64]:
    """Return the policy version of each of `count` tokens; a message without ranges is of version `default`."""
    ranges = message.get("policy_versions")
    if ranges is None:
        return np.full(count, default, np.int64)
    versions, covered = np.empty(count, np.int64), 0
    for start, end, version in ranges:
        if start != covered or not start <= end <= count:
            break
        versions[start:end], covered = version, end
    if covered != count:
        raise DataError(
            f"{where}: policy_versions must cover its {count} tokens by ranges without gap or overlap, got {list(ranges)}"
        )
    return versions


def _field(message: Mapping[str, Any], key: str, where: str) -> Any:
    value = message.get(key)
    if value is None:
        raise DataError(f"{where}: {key} must be present, got a message with {sorted(message)}")
    return value


def _per_token(value: Any, count: int, dtype: type, key: str, where: str) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(value, dtype).reshape(-1)
    if len(array) != count:
        raise DataError(f"{where}: {key} must have one entry per token, got {len(array)} for {count} tokens")
    return array
