"""The train backend of language models under FSDP: packed micro-batches, one after the other, through the manager's model."""

from collections.abc import Sequence

import torch

from rl_core.actors.backend import Objective, Proceed, Scored, Scores, StepCancelled
from rl_core.actors.forward import PackedBatch, score
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.stats import Stat


class FSDPBackend(FSDPModelManager):
    """A TrainBackend. All its ranks are data ranks, and each has the whole model's scores and loss."""

    def forward_backward(
        self, parts: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Add the gradients of all `parts`; return the objective's statistics of each. See TrainBackend."""
        stats: list[dict[str, Stat]] = []
        for index, rows in enumerate(parts):
            try:
                proceed()
            except StepCancelled:
                if index:
                    # FSDP holds gradients back until the last micro-batch: an empty last one has it reduce them, so that they can be dropped.
                    self._train_part(rows.masked_row(), objective, normalizers, is_last=True)
                self.drop_gradients()
                raise
            stats.append(self._train_part(rows, objective, normalizers, is_last=index == len(parts) - 1))
        return stats

    def _train_part(
        self, rows: StepRows, objective: Objective, normalizers: LossNormalizers, *, is_last: bool
    ) -> dict[str, Stat]:
        with self.before_micro_batch(self.model, is_last):
            columns = rows.columns.to(self.compute_device)
            log_probs, entropy, values = score(
                self.model, self._pack(rows), temperature=self._temperature, entropy=True, values=self.has_critic
            )
            assert log_probs is not None and entropy is not None
            result = objective(Scores(log_probs, entropy, values), columns, normalizers)
            # FSDP averages gradients over ranks; shares of the loss are to be summed.
            (result.loss * self.ranks.size).backward()
        return result.metrics

    def score_rows(
        self, parts: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[Scored]:
        """Return what was asked for of each part. See TrainBackend."""
        scored = []
        for rows in parts:
            proceed()
            with torch.no_grad():
                found = score(
                    self.model, self._pack(rows), temperature=self._temperature, log_probs=log_probs, values=values
                )
            scored.append(Scored(*(None if one is None else one.cpu() for one in (found.log_probs, found.values))))
        return scored

    @property
    def _temperature(self) -> float:
        return self.cfg.rollout.sampling.temperature

    def _pack(self, rows: StepRows) -> PackedBatch:
        self._require_loaded("a forward pass")
        columns = rows.columns
        return PackedBatch.of(columns.input_ids, rows.lengths, columns.loss_mask, self.compute_device)
