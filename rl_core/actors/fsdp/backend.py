"""Runs a language model under FSDP: packed micro-batches, one after the other."""

from collections.abc import Sequence

import torch

from rl_core.actors.backend import DetachedScores, Objective, Proceed, Scores, StepCancelled, TrainBackend
from rl_core.actors.forward import PackedBatch, score
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.stats import Stat


class FSDPBackend(TrainBackend):
    """The train backend of FSDP1 and FSDP2. All ranks are data ranks, and each computes the scores and the loss of its own rows."""

    def __init__(self, manager: FSDPModelManager) -> None:
        """Run the model of `manager`, which may be set up later."""
        self.manager: FSDPModelManager = manager
        self._temperature = manager.cfg.rollout.sampling.temperature

    def forward_backward(
        self, micro_batches: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Accumulate the gradients of all micro-batches; return the objective's statistics of each. See TrainBackend."""
        stats: list[dict[str, Stat]] = []
        for index, rows in enumerate(micro_batches):
            try:
                proceed()
            except StepCancelled:
                if index:
                    # FSDP holds gradients back until the last micro-batch. An empty last one makes it reduce them, so that they can
                    # be dropped.
                    self._train_part(rows.masked_row(), objective, normalizers, is_last=True)
                self.manager.drop_gradients()
                raise
            stats.append(self._train_part(rows, objective, normalizers, is_last=index == len(micro_batches) - 1))
        return stats

    def _train_part(
        self, rows: StepRows, objective: Objective, normalizers: LossNormalizers, *, is_last: bool
    ) -> dict[str, Stat]:
        manager = self.manager
        with manager.before_micro_batch(manager.model, is_last):
            columns = rows.columns.to(manager.compute_device)
            result = objective(self._scores(rows), columns, normalizers)
            # FSDP averages gradients over the ranks, but the shares of the loss must be summed.
            (result.loss if manager.ranks.size == 1 else result.loss * manager.ranks.size).backward()
        return result.metrics

    def _scores(self, rows: StepRows) -> Scores:
        """Return the outputs of the model for the rows, with gradient."""
        numbers = score(
            self.manager.model,
            self._pack(rows),
            temperature=self._temperature,
            entropy=True,
            values=self.manager.has_critic,
        )
        assert numbers.log_probs is not None and numbers.entropy is not None
        return Scores(numbers.log_probs, numbers.entropy, numbers.values, numbers.candidates)

    def score_rows(
        self, micro_batches: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[DetachedScores]:
        """Return the requested scores of each micro-batch. See TrainBackend."""
        scored = []
        for rows in micro_batches:
            proceed()
            with torch.no_grad():
                numbers = score(
                    self.manager.model,
                    self._pack(rows),
                    temperature=self._temperature,
                    log_probs=log_probs,
                    values=values,
                )
            scored.append(DetachedScores(numbers.log_probs, numbers.values))
        return DetachedScores.on_cpu(scored)

    def _pack(self, rows: StepRows) -> PackedBatch:
        self.manager.residency.require_loaded("a forward pass")
        columns = rows.columns
        device = self.manager.compute_device
        return PackedBatch.of(
            columns.input_ids,
            rows.lengths,
            columns.loss_mask,
            device,
            candidates=columns.candidates,
            attention=self.manager.cfg.actor.attention,
        )
