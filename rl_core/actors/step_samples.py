"""Keeps some prompt groups of a training step for people to look at, with the numbers that the trainer computed for their tokens.

The kept groups are the first ones of the step in the order of their names, which says nothing about their rewards. All ranks number the
rows of a step alike, so each rank knows without communication which of the rows that it trains are kept.

Legend: B rows of a micro-batch, T tokens of its longest row.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rl_core.actors.backend import Objective, Scores
from rl_core.actors.preparation import PreparedBatch
from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.transfer import to_host
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses import LossResult
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.samples import keep_sample
from rl_core.messages.samples import TRAINED, KeptSample, StepSamples

logger = logging.getLogger(__name__)


class StepSampler:
    """What this rank keeps of the current step, until `take`."""

    def __init__(self, rows: int) -> None:
        """`rows`: number of rows of a step that are kept, over all ranks; 0 keeps none."""
        self._limit = rows
        self._log_probs: dict[int, tuple[Tensor, Tensor]] = {}
        """Row number -> the trainer's log-probabilities and mask, [T], on the device."""
        self._step: tuple[PreparedBatch, list[PromptGroupRecord], list[int]] | None = None
        """The arguments of the last call of `remember`."""

    def clear(self) -> None:
        """Forget the last step."""
        self._log_probs, self._step = {}, None

    def watching(self, objective: Objective, parts: Sequence[StepRows]) -> Objective:
        """Return `objective`, which also remembers the log-probabilities of kept rows; it is called once per part, in their order.

        Nothing is copied off the device here: the copy would wait for the device in the middle of a step.
        """
        if not any(0 <= number < self._limit for rows in parts for number in rows.numbers):
            return objective
        remaining = iter(parts)

        def call(scores: Scores, columns: Columns, normalizers: LossNormalizers) -> LossResult:
            rows = next(remaining, None)
            # A step that is cancelled ends with a masked row that is none of the parts.
            has_rows = rows is not None and columns.input_ids.shape == (len(rows.numbers), max(rows.lengths))
            for index, number in enumerate(rows.numbers if rows is not None and has_rows else ()):
                if rows is not None and 0 <= number < self._limit and number not in self._log_probs:
                    length = rows.lengths[index]
                    log_probs = scores.log_probs[index, :length].detach().clone()
                    self._log_probs[number] = log_probs, columns.loss_mask[index, :length].clone()
            return objective(scores, columns, normalizers)

        return call

    def remember(self, prepared: PreparedBatch, records: Sequence[PromptGroupRecord], numbers: Sequence[int]) -> None:
        """Remember the step's groups until `take`. `numbers` [B] are the row numbers, in the step, of the completions of `records`."""
        self._step = prepared, list(records), list(numbers)

    def _samples(self) -> list[KeptSample]:
        """Return the completions of the step whose rows are among the first."""
        if self._step is None:
            return []
        prepared, records, numbers = self._step
        samples = []
        batch, advantages = prepared.batch, prepared.advantages
        places = [(record, index) for record in records for index in range(len(record.completions))]
        for row, ((record, index), number) in enumerate(zip(places, numbers, strict=True)):
            if number >= self._limit:
                continue
            sample = keep_sample(record, index, group_id=batch.group_texts[int(batch.group_ids[row])])
            length = len(sample.token_ids)
            trains = batch.loss_mask[row, :length].numpy()
            samples.append(
                replace(
                    sample,
                    row=number,
                    mask=np.where(trains, np.uint8(TRAINED), sample.mask),
                    shaped_reward=float(batch.rewards[row]),
                    advantages=None if advantages is None else advantages[row, :length].numpy().astype(np.float32),
                )
            )
        return samples

    def take(self) -> StepSamples:
        """Return the samples that were kept of the last step, and delete them here."""
        # Where the mask is false there is no log-probability.
        host_log_probs = to_host(values.float().where(mask, np.nan) for values, mask in self._log_probs.values())
        log_probs = [(number, values.numpy()) for number, values in zip(self._log_probs, host_log_probs, strict=True)]
        try:
            samples = self._samples()
        except Exception:
            logger.exception("samples of a step are not kept")
            samples = []
        self.clear()
        return StepSamples(samples=tuple(samples), log_probs=tuple(log_probs))
