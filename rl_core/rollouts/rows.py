"""Rows of token ids: what an engine takes (`Row`), what it returns (`GenerationOutput`), and the interface that runs them (`RowQueue`).

The limits and the finish reason of a row, and the check of its prompt, are here, so that every engine ends a row for the same reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.api.records import FinishReason
from rl_core.rollouts.sampling import SamplingParams

OnTokens = Callable[[list[int]], None]
"""Receives the ids that a row got since the last call, on a thread of the engine; must not block. Ids of the last step may be left out:
the row's output has all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """The generated part of one row."""

    ids: list[int]
    """Generated token ids, including the one that ended the row."""
    logprobs: list[float]
    """Log-probability of each id under softmax(logits / temperature) over the whole vocabulary."""
    finish_reason: str
    """A `FinishReason`: stop, length (max_new_tokens reached) or seq_limit (max_seq_len reached)."""
    versions: list[tuple[int, int, int]]
    """(start, end, policy version) ranges over `ids`, contiguous from 0."""
    worker: int = 0
    """Index of the backend's worker that generated the row; 0 for a backend with one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence to be generated."""

    key: Hashable
    """Identifies the row in its result and in `RowQueue.abort`."""
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    """Sampling seed in [0, 2**64)."""
    batch: int | None = None
    """Rows with the same number run as an engine batch of their own; None = in any batch."""
    on_tokens: OnTokens | None = None
    """Called with new tokens of the row while it runs; None = new tokens are not reported."""


Result = tuple[Any, GenerationOutput | BaseException]
"""(key of the row, its output or the reason why it has none)."""
Sink = Callable[[list[Result]], None]
"""Receives the rows that ended together, on a thread of the engine; must not block."""


class RowQueue(Protocol):
    """Runs rows. Implemented by `hf.loop.EngineLoop` and `sglang.engine.SGLangEngine`. All methods may be called from any thread."""

    @property
    def version(self) -> int:
        """Policy version of the weights that new tokens are drawn from."""
        ...

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Queue `rows` together; `sink` gets each result once. Raises GenerationUnavailable if the engine cannot run any."""
        ...

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop the rows with these keys; `sink` gets no result for them."""
        ...


def token_limit(prompt_tokens: int, params: SamplingParams, max_seq_len: int) -> tuple[int, str]:
    """Return (most new tokens of a row, finish reason when that many were generated).

    The number is 0 if the prompt fills the sequence or `params` asks for no token: the row then ends without running.
    """
    num_free = max_seq_len - prompt_tokens
    reason = FinishReason.SEQ_LIMIT if num_free < params.max_new_tokens else FinishReason.LENGTH
    return min(params.max_new_tokens, num_free), reason.value


def check_prompt(prompt: Sequence[int], params: SamplingParams, *, vocab_size: int, max_seq_len: int) -> None:
    """Raise ValueError if `prompt` is empty or longer than `max_seq_len`, or if it or the logit bias has ids outside [0, `vocab_size`).

    Such a row must be rejected before it is queued, because in the middle of a batch it would fail every row of the batch.
    """
    if not 1 <= len(prompt) <= max_seq_len:
        raise ValueError(
            f"a prompt must have 1 to max_seq_len={max_seq_len} tokens, got {len(prompt)}; shorten it or raise max_seq_len"
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {low} to {high}; use the model's tokenizer")
    invalid = [token for token, _ in params.logit_bias if not 0 <= token < vocab_size]
    if invalid:
        raise ValueError(
            f"token ids of logitBias must be in [0, {vocab_size}), got {invalid}; use ids of the model's tokenizer"
        )
