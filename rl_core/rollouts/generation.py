"""A generation backend as rollouts see it: its interface, its settings, the batch it takes and gives, the seeds of samples.

Engines (`hf/`) implement `GenerationInterface`; `multi_turn` and `manager` call it and never know which engine serves.
"""

from __future__ import annotations

import asyncio
from abc import ABC
from collections.abc import AsyncIterator, Mapping
from hashlib import blake2b
from typing import Any, TypedDict


class GenerationConfig(TypedDict, total=False):
    """Settings of a generation backend; a key that the backend does not honour is refused by it."""

    backend: str
    """Name of the backend, for messages."""
    model_name: str
    """Name of the model, for messages."""
    max_new_tokens: int
    """Longest generation of one turn, tokens."""
    temperature: float
    """Softmax temperature of training rollouts, > 0."""
    top_p: float
    """Nucleus of training rollouts; 1 = off."""
    top_k: int | None
    """Top-k of training rollouts; None = off."""
    val_temperature: float
    """Temperature of validation; 0 = greedy."""
    val_top_p: float
    """Nucleus of validation."""
    val_top_k: int | None
    """Top-k of validation."""
    stop_token_ids: list[int] | None
    """Token ids that end a generation besides the tokenizer's end of sequence."""
    stop_strings: list[str] | None
    """Strings that end a generation; they stay in text and tokens."""
    bad_words: list[str] | None
    """Words never generated, where a backend can."""
    colocated: dict[str, Any]
    """`{enabled, resources}`."""
    port_range: tuple[int, int]
    """Ports a backend with servers of its own may use."""
    use_async_rollouts: bool
    """Rollouts are always asynchronous here; only true is honoured."""
    _pad_token_id: int
    """Padding of `input_ids` and `output_ids`."""


class BatchedDataDict(dict[str, Any]):
    """Batch of rows: every value is a tensor or list whose first dimension is the row."""

    @property
    def size(self) -> int:
        """Return the number of rows, 0 for an empty batch."""
        return next((len(value) for value in self.values()), 0)

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Return rows [start, end) as a batch that shares storage with this one."""
        return BatchedDataDict({key: value[start:end] for key, value in self.items()})


class GenerationInterface(ABC):  # noqa: B024 - either of the two generates is enough
    """A generation backend as rollouts see it. Implemented by `hf.HFGeneration`; a subclass gives one of the generates.

    In: `input_ids` [B, S] int64 right-padded, `input_lengths` [B], optional `stop_strings` (per row), `seeds` (ints).
    Out: `output_ids` [B, S'], `generation_lengths`, `unpadded_sequence_lengths` (prompt + generated), `logprobs`
    [B, S'] float32 (0 on the prompt), `truncated` [B] bool, `finish_reasons` list of str, `policy_versions` per row a
    list of `(start, end, version)` relative to the generated slice.
    """

    blocks_training: bool = False
    """Whether training must wait while this backend generates (it shares the device)."""
    wake_carries_weight_updates: bool = False
    """Whether `prepare_for_generation` also brings weights."""
    requires_kv_scale_sync: bool = False
    """Whether scales of a quantised KV cache travel with the weights."""
    honours_seeds: bool = True
    """Whether `seeds` make a sample repeatable; where not, its record has none."""
    policy_version: int = 0
    """Version of the weights that new tokens come from; a backend may set it or make it a property."""

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Join the collective that brings weights, where the backend uses one."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights by collective")

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Return the outputs of all rows of `data`, in order."""
        raise NotImplementedError(f"{type(self).__name__} generates asynchronously only; use generate_async")

    async def generate_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict]]:
        """Yield `(index, one-row batch)` as rows finish."""
        batch = await asyncio.to_thread(self.generate, data, greedy)
        for index in range(len(data["input_ids"])):
            yield index, batch.slice(index, index + 1)

    def prepare_for_generation(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> bool:
        """Bring what `tags` names back to the device; idempotent."""
        return True

    def finish_generation(self) -> bool:
        """Release what is only needed while generating; idempotent."""
        return True

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Stop the backend; idempotent."""

    def prepare_refit_info(self, info: Mapping[str, Any]) -> None:  # noqa: B027 - optional hook
        """Take names and shapes of the weights to come."""

    def update_weights_via_ipc_zmq(self) -> None:
        """Take weights by handles of the same device."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights by IPC")

    def update_weights_from_collective(self) -> None:
        """Take weights by collective."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights by collective")

    def invalidate_kv_cache(self) -> bool:
        """Drop cached keys and values of earlier weights."""
        return True

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return the backend's own metrics since the last clear."""
        return {}

    def clear_logger_metrics(self) -> None:  # noqa: B027 - optional hook
        """Start the backend's metrics anew."""


def sample_seed(seed: int, group_id: str, index: int, attempt: int = 1) -> int:
    """Return the 63-bit sampling seed of generation `index` of a group: BLAKE2b of the tuple.

    Generations differ, a resumed run repeats them; `attempt` rises only for data and deadline retries.
    """
    text = "\x1f".join((str(seed), str(group_id), str(index), str(attempt)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
