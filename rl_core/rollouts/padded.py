"""`PaddedGenerator`: uses a generation backend that takes and returns padded tensors, as NeMo-RL's do, for rollouts outside a job.

`RolloutManager` and `AsyncRolloutImpl` accept such a backend (`GenerationInterface`). The engines of a job take rows and do not pass here.

Legend: B rows, S padded prompt length, T padded length of prompt and completion.
"""

from __future__ import annotations

import asyncio
from abc import ABC
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch

from rl_core.api.errors import RolloutDataFailure
from rl_core.api.records import FinishReason
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.request_batcher import RowGroup
from rl_core.rollouts.rows import GenerationOutput, OnTokens


class BatchedDataDict(dict[str, Any]):
    """Batch of rows: every value is a tensor or list whose first dimension is the row."""

    @property
    def size(self) -> int:
        """Return the number of rows, 0 for an empty batch."""
        return next((len(value) for value in self.values()), 0)

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Return rows [start, end) as a batch that shares storage with this one."""
        return BatchedDataDict({key: value[start:end] for key, value in self.items()})


class GenerationInterface(ABC):  # noqa: B024 - a subclass overrides either of the two generates
    """A generation backend that works on padded tensors; a subclass overrides `generate` or `generate_async`.

    Input: `input_ids` [B, S] int64 right-padded, `input_lengths` [B], `stop_strings` (a list or None per row), `seeds` (an int per row).
    Output: `output_ids` [B, T], `unpadded_sequence_lengths` [B] (prompt and completion), `logprobs` [B, T] float32. Optional:
    `truncated` [B] bool, `finish_reasons` (a str per row), `policy_versions` (per row a list of `(start, end, version)` over the
    completion), `gen_leader_worker_idx` [B].
    """

    honours_seeds: bool = True
    """Whether `seeds` make a sample repeatable; if not, records hold no seed."""
    policy_version: int = 0
    """Version of the weights that new tokens are drawn from; a backend may set it or make it a property."""

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


class PaddedGenerator:
    """`RowGenerator` over a backend with the `generate_async` of `GenerationInterface`."""

    def __init__(self, backend: Any) -> None:
        """Use `backend`; its attributes `policy_version` and `honours_seeds` are optional."""
        self._backend = backend

    @property
    def policy_version(self) -> int:
        """Version of the backend's weights; 0 (initial weights) if it has no versions."""
        return int(getattr(self._backend, "policy_version", 0))

    @property
    def honours_seeds(self) -> bool:
        """Whether a seed makes a sample repeatable, as the backend says; True if it does not say."""
        return bool(getattr(self._backend, "honours_seeds", True))

    async def generate_row(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        stop_strings: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        greedy: bool = False,
        group: RowGroup | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerationOutput:
        """Return the continuation of `prompt`; see `RowGenerator.generate_row`. `group` and `on_tokens` are ignored.

        Raises RolloutDataFailure if the backend yields no row.
        """
        data = BatchedDataDict(
            {
                "input_ids": torch.tensor([list(prompt)], dtype=torch.int64),
                "input_lengths": torch.tensor([len(prompt)], dtype=torch.int32),
                "stop_strings": [None if stop_strings is None else list(stop_strings)],
                "seeds": [seed],
            }
        )
        if max_new_tokens is not None:
            data["max_new_tokens"] = [max_new_tokens]
        rows = [row async for _, row in self._backend.generate_async(data, greedy=greedy)]
        if not rows:
            raise RolloutDataFailure("generate_async must yield one row, got none; this is a bug of the backend")
        return self._row(rows[-1], len(prompt))

    def _row(self, output: Mapping[str, Any], start: int) -> GenerationOutput:
        """Return what the backend generated after the `start` tokens of the prompt."""
        end = int(output["unpadded_sequence_lengths"][0])
        versions = output["policy_versions"][0] if "policy_versions" in output else None
        if versions is None:
            versions = [(0, end - start, self.policy_version)] if end > start else []
        truncated = bool(output["truncated"][0]) if "truncated" in output else False
        reasons = output.get("finish_reasons")
        default = FinishReason.LENGTH if truncated else FinishReason.STOP
        worker = output.get("gen_leader_worker_idx")
        return GenerationOutput(
            ids=torch.as_tensor(output["output_ids"][0, start:end]).tolist(),
            logprobs=torch.as_tensor(output["logprobs"][0, start:end]).to(torch.float32).tolist(),
            finish_reason=str(reasons[0]) if reasons else default.value,
            versions=[tuple(part) for part in versions],
            worker=int(worker[0]) if worker is not None else 0,
        )


def row_generator(backend: Any) -> RowGenerator:
    """Return `backend` if it generates rows, else a `PaddedGenerator` over it."""
    return backend if hasattr(backend, "generate_row") else PaddedGenerator(backend)
