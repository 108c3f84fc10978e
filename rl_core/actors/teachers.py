"""Asks the teachers of on-policy distillation for the log-probabilities of a step's tokens.

The step waits, and nothing is trained before all answers are there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.actors.row_calls import RowCalls, place_row
from rl_core.api.distillation import DistillationSpec
from rl_core.api.errors import DataError
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.workers.worker import Worker


class TeacherScores(NamedTuple):
    """The teachers' scores of a batch. B rows, S tokens of the padded row, K candidates; zeros where nothing trains."""

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
        self._calls, self._spec = RowCalls(worker, seconds=seconds), distillation
        self._temperature = temperature

    def __call__(self, batch: TrainingBatch, records: Sequence[PromptGroupRecord]) -> TeacherScores:
        """Return the teachers' scores of `batch`.

        `records` are the groups of the batch in the order of its rows. Raises DataError for a prompt without a teacher, and
        InfrastructureError when a teacher does not answer in time.
        """
        groups = [group for record in records for group in [self._group(record)] * len(record.completions)]
        method, options = ("log_probs", ()) if self._spec.top_k is None else ("top_log_probs", (self._spec.top_k,))
        answers = self._calls.ask(groups, batch, method, self._temperature, *options)
        shape, count = batch.input_ids.shape, self._spec.top_k
        tensors = [torch.zeros(shape)]
        if count is not None:
            tensors += [torch.zeros(*shape, count, dtype=torch.int64), torch.zeros(*shape, count)]
        for index, length in enumerate(batch.lengths.tolist()):
            answer = answers[index]
            for tensor, values in zip(tensors, (answer,) if count is None else answer, strict=True):
                place_row(tensor, index, values, length, of=f"teacher {groups[index]}")
        for tensor in tensors:
            tensor[~batch.loss_mask] = 0
        return TeacherScores(*tensors, *[None] * (3 - len(tensors)))

    def _group(self, record: PromptGroupRecord) -> str:
        column = self._spec.column
        value = None if column is None else (record.extra_env_info or {}).get(column)
        if (group := self._spec.group_of(value)) is None:
            raise DataError(
                f"algorithm.distillation.teachers must have a teacher for each value of the column {column}, got {value!r} "
                f"in prompt {record.prompt_idx} and teachers for {', '.join(sorted(self._spec.teachers))}; add it"
            )
        return group
