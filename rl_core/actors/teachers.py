"""Asks the teachers of on-policy distillation for the log-probabilities of a step's tokens.

The rows are sent in parts to all members of the teacher's group at once. If a member is lost, its parts go to another one, so the step waits
and nothing is trained before all answers are there.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_core.api.distillation import DistillationSpec
from rl_core.api.errors import DataError, DeadlineExceeded, InfrastructureError
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.workers.member_calls import MemberCaller
from rl_core.workers.worker import Worker

PART_TOKENS = 8192
"""Tokens of one call, so that the rows of a step are spread over the members of the group."""


class TeacherScores(NamedTuple):
    """What the teachers say of a batch. B rows, S tokens of the padded row, K candidates; zeros where nothing trains."""

    log_probs: Tensor
    """[B, S] float32, log-probabilities of the tokens."""
    candidates: Tensor | None
    """[B, S, K] int64, the likeliest tokens in the place of each token; None without `topK`."""
    candidate_log_probs: Tensor | None
    """[B, S, K] float32, their log-probabilities."""


class Teachers:
    """The teachers of a job, as an actor calls them."""

    def __init__(self, worker: Worker, distillation: DistillationSpec, *, temperature: float, seconds: float) -> None:
        """`temperature` divides the logits, as where the tokens were sampled. `seconds` bounds the wait for all answers of a step."""
        self._callers, self._spec = MemberCaller(worker), distillation
        self._temperature, self._seconds = temperature, seconds

    def __call__(self, batch: TrainingBatch, records: Sequence[PromptGroupRecord]) -> TeacherScores:
        """Return the teachers' scores of `batch`.

        `records` are the groups of the batch in the order of its rows. Raises DataError for a prompt without a teacher, and
        InfrastructureError when a teacher does not answer in time.
        """
        groups = [group for record in records for group in [self._group(record)] * len(record.completions)]
        lengths = batch.lengths.tolist()
        rows = [batch.input_ids[index, :length].numpy() for index, length in enumerate(lengths)]
        try:
            answers = asyncio.run(self._ask(groups, rows))
        except DeadlineExceeded as error:
            raise InfrastructureError(f"the teachers must answer within {self._seconds:.0f} s: {error}") from error
        shape, count = batch.input_ids.shape, self._spec.top_k
        parts = [torch.zeros(shape)]
        if count is not None:
            parts += [torch.zeros(*shape, count, dtype=torch.int64), torch.zeros(*shape, count)]
        for index, answer in enumerate(answers):
            for part, values in zip(parts, (answer,) if count is None else answer, strict=True):
                wanted = (lengths[index], *part.shape[2:])
                if values.shape != wanted:
                    raise DataError(
                        f"teacher {groups[index]} must return values of shape {wanted} for a row of {lengths[index]} tokens, got {values.shape}"
                    )
                part[index, : lengths[index]] = torch.from_numpy(np.array(values)).to(part.dtype)
        for part in parts:
            part[~batch.loss_mask] = 0
        return TeacherScores(*parts, *[None] * (3 - len(parts)))

    def _group(self, record: PromptGroupRecord) -> str:
        column = self._spec.column
        value = None if column is None else (record.extra_env_info or {}).get(column)
        if (group := self._spec.group_of(value)) is None:
            raise DataError(
                f"algorithm.distillation.teachers must have a teacher for each value of the column {column}, got {value!r} "
                f"in prompt {record.prompt_idx} and teachers for {', '.join(sorted(self._spec.teachers))}; add it"
            )
        return group

    async def _ask(self, groups: Sequence[str], rows: Sequence[np.ndarray]) -> list[Any]:
        """Return the answer for each row: an array without `topK`, else the three arrays of TopScores."""
        parts, count = list(_parts(groups, rows)), self._spec.top_k
        method, options = ("log_probs", ()) if count is None else ("top_log_probs", (count,))
        calls = [
            self._callers.call(
                groups[part[0]],
                method,
                [rows[index] for index in part],
                self._temperature,
                *options,
                seconds=self._seconds,
            )
            for part in parts
        ]
        found: list[Any] = [None] * len(rows)
        for part, answers in zip(parts, await asyncio.gather(*calls), strict=True):
            for index, answer in zip(part, answers, strict=True):
                found[index] = answer
        return found


def _parts(groups: Sequence[str], rows: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Yield the indices of the rows of each call: rows of one group with at most PART_TOKENS, or one longer row."""
    for group in sorted(set(groups)):
        part: list[int] = []
        tokens = 0
        for index in (index for index, name in enumerate(groups) if name == group):
            if part and tokens + len(rows[index]) > PART_TOKENS:
                yield part
                part, tokens = [], 0
            part.append(index)
            tokens += len(rows[index])
        yield part
