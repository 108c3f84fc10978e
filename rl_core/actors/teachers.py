"""Asks the teachers of on-policy distillation for the log-probabilities of a step's tokens.

The rows are sent in parts to all members of the teacher's group at once. If a member is lost, its parts go to another one, so the step waits
and nothing is trained before all answers are there.
"""

import asyncio
from collections.abc import Iterator, Sequence

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


class Teachers:
    """The teachers of a job, as an actor calls them."""

    def __init__(self, worker: Worker, distillation: DistillationSpec, *, temperature: float, seconds: float) -> None:
        """`temperature` divides the logits, as where the tokens were sampled. `seconds` bounds the wait for all answers of a step."""
        self._callers, self._spec = MemberCaller(worker), distillation
        self._temperature, self._seconds = temperature, seconds

    def __call__(self, batch: TrainingBatch, records: Sequence[PromptGroupRecord]) -> Tensor:
        """Return the teacher's log-probability of each token of `batch`, [B, S] float32; zeros where nothing trains.

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
        found = torch.zeros(batch.input_ids.shape)
        for index, answer in enumerate(answers):
            if answer.shape != (lengths[index],):
                raise DataError(
                    f"teacher {groups[index]} must return {lengths[index]} log-probabilities for a row, got {answer.shape}"
                )
            found[index, : lengths[index]] = torch.from_numpy(np.array(answer, dtype=np.float32))
        return torch.where(batch.loss_mask, found, 0.0)

    def _group(self, record: PromptGroupRecord) -> str:
        column = self._spec.column
        value = None if column is None else (record.extra_env_info or {}).get(column)
        if (group := self._spec.group_of(value)) is None:
            raise DataError(
                f"algorithm.distillation.teachers must have a teacher for each value of the column {column}, got {value!r} "
                f"in prompt {record.prompt_idx} and teachers for {', '.join(sorted(self._spec.teachers))}; add it"
            )
        return group

    async def _ask(self, groups: Sequence[str], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = list(_parts(groups, rows))
        calls = [
            self._callers.call(
                groups[part[0]], "log_probs", [rows[index] for index in part], self._temperature, seconds=self._seconds
            )
            for part in parts
        ]
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
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
