"""Asks members of other groups about the rows of a step.

The rows are sent in parts to all members of a group at once. If a member is lost, its parts go to another one.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.api.errors import DataError, DeadlineExceeded, InfrastructureError
from rl_core.batching.collate import TrainingBatch
from rl_core.workers.member_calls import MemberCaller
from rl_core.workers.worker import Worker

PART_TOKENS = 8192
"""Tokens of one call, so that the rows of a step are spread over the members of the group."""


class RowCalls:
    """Calls of `worker` to the members of other groups."""

    def __init__(self, worker: Worker, *, seconds: float) -> None:
        """`seconds` bounds the wait for all answers of a step."""
        self._callers, self._seconds = MemberCaller(worker), seconds

    def ask(self, groups: Sequence[str], batch: TrainingBatch, method: str, *options: Any) -> list[Any]:
        """Return what `method(rows, *options)` answers for each row of `batch`. `groups` names the group that is asked for each row.

        Raises InfrastructureError when not all answers come in time, and the errors of the method.
        """
        rows = [batch.input_ids[index, :length].numpy() for index, length in enumerate(batch.lengths.tolist())]
        answers: list[Any] = self._answers(self._ask(groups, rows, method, options), *sorted(set(groups)))
        return answers

    def token_values(self, group: str, batch: TrainingBatch, method: str, *options: Any) -> Tensor:
        """Return what `method(rows, *options)` of `group` answers for each token of `batch`: [B, S] float32, zeros where nothing trains.

        Raises as `ask`, and DataError for an answer of another shape.
        """
        values = torch.zeros(batch.input_ids.shape)
        answers = self.ask([group] * len(batch), batch, method, *options)
        for index, (answer, length) in enumerate(zip(answers, batch.lengths.tolist(), strict=True)):
            place_row(values, index, answer, length, of=f"group {group}")
        values[~batch.loss_mask] = 0
        return values

    def call(self, group: str, method: str, /, *args: Any) -> Any:
        """Return `method(*args)` of a member of `group`. Raises as `ask`."""
        return self._answers(self._callers.call(group, method, *args, seconds=self._seconds), group)

    def _answers(self, calls: Coroutine[Any, Any, Any], *groups: str) -> Any:
        try:
            return asyncio.run(calls)
        except DeadlineExceeded as error:
            raise InfrastructureError(
                f"{', '.join(groups)} must answer within {self._seconds:.0f} s: {error}"
            ) from error

    async def _ask(
        self, groups: Sequence[str], rows: Sequence[np.ndarray], method: str, options: tuple[Any, ...]
    ) -> list[Any]:
        parts = list(_rows_of_calls(groups, rows))
        calls = [
            self._callers.call(
                groups[indices[0]], method, [rows[index] for index in indices], *options, seconds=self._seconds
            )
            for indices in parts
        ]
        results: list[Any] = [None] * len(rows)
        for indices, answers in zip(parts, await asyncio.gather(*calls), strict=True):
            for index, answer in zip(indices, answers, strict=True):
                results[index] = answer
        return results


def place_row(target: Tensor, index: int, values: np.ndarray, length: int, *, of: str) -> None:
    """Write the `values` of a row of `length` tokens into `target` [B, S, ...] at `index`.

    Raises DataError, which names the group `of`, for values of another shape.
    """
    expected = (length, *target.shape[2:])
    if values.shape != expected:
        raise DataError(f"{of} must return values of shape {expected} for a row of {length} tokens, got {values.shape}")
    target[index, :length] = torch.from_numpy(np.array(values)).to(target.dtype)


def _rows_of_calls(groups: Sequence[str], rows: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Yield the indices of the rows of each call: rows of one group with at most PART_TOKENS, or one longer row."""
    for group in sorted(set(groups)):
        indices: list[int] = []
        tokens = 0
        for index in (index for index, name in enumerate(groups) if name == group):
            if indices and tokens + len(rows[index]) > PART_TOKENS:
                yield indices
                indices, tokens = [], 0
            indices.append(index)
            tokens += len(rows[index])
        yield indices
