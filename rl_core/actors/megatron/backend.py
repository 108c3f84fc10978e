"""The train backend of language models under megatron-core: micro-batches through its schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.backend import Objective, Proceed, Scores, StepCancelled
from rl_core.actors.forward import PackedBatch
from rl_core.actors.megatron import library
from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.actors.megatron.packing import Packing
from rl_core.actors.reference import ReferencePolicy
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.logprobs import hidden_scores
from rl_core.algorithms.stats import Stat
from rl_core.api.job import RLJobSpec
from rl_core.batching.packing import unpack_rows

Answer = Callable[[StepRows, Scores], Any]
"""Made of a micro-batch's scores on a rank that has them."""


class MegatronBackend(MegatronModelManager):
    """A TrainBackend. Ranks of one replica (tensor) train the same rows; each has the scores of all its tokens."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], world_size: int, rank: int) -> None:
        super().__init__(cfg, world_size, rank)
        self._reference: ReferencePolicy | None = None

    def setup_model_and_optimizer(self) -> None:
        """Set up as the manager does; keep the starting weights as reference policy where KL needs one."""
        super().setup_model_and_optimizer()
        if self.cfg.algorithm.needs_reference:
            self._reference = ReferencePolicy([p.detach() for p in self._parameters().values()])

    @property
    def max_length(self) -> int:
        """Longest row in tokens: the configured limit, else the model's."""
        return int(self.cfg.rollout.max_sequence_length or self.template.config.max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the model."""
        return int(self.template.config.hidden_size)

    def forward_backward(
        self, parts: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Add the gradients of all `parts`; return the objective's statistics of each. See TrainBackend."""
        # The schedule divides by the number of micro-batches, reducing gradients by the data ranks; shares are to be summed.
        scale = len(parts) * self.ranks.data_size

        def loss(rows: StepRows, scores: Scores) -> tuple[Tensor, dict[str, Stat]]:
            result = objective(scores, rows.columns.to(self.compute_device), normalizers)
            return result.loss * scale, result.metrics

        if self.is_grad_offloaded:
            self._zero_gradients()
            self.is_grad_offloaded = False
        try:
            stats: list[dict[str, Stat]] = self._run(parts, loss, proceed, entropy=True)
        except StepCancelled:
            self.drop_gradients()
            raise
        return stats if self.cut.rank == 0 else []

    def score_rows(self, parts: Sequence[StepRows], *, proceed: Proceed) -> list[Tensor]:
        """Return each part's log-probabilities [B, T] without gradient, on the CPU."""

        def log_probs(rows: StepRows, scores: Scores) -> Tensor:
            return scores.log_probs.cpu()

        with torch.no_grad():
            scored: list[Tensor] = self._run(parts, log_probs, proceed, entropy=False, forward_only=True)
        return scored

    def _run(
        self, parts: Sequence[StepRows], answer: Answer, proceed: Proceed, *, entropy: bool, forward_only: bool = False
    ) -> list[Any]:
        """Run the schedule over `parts`; return what `answer` gave for each, its loss aside."""
        self._require_loaded("a forward pass")

        def step(rows_left: Iterator[StepRows], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
            proceed()
            rows = next(rows_left)
            batch = self._pack(rows)
            hidden = stage(
                input_ids=batch.rows.input_ids,
                position_ids=batch.rows.position_ids,
                attention_mask=None,
                packed_seq_params=Packing.of(batch),
            )
            return hidden, partial(finish, rows, batch, stage)

        def finish(rows: StepRows, batch: PackedBatch, stage: Any, hidden: Tensor, non_loss_data: bool = False) -> Any:
            return answer(rows, self._scores(hidden, batch, stage.module, entropy))

        with self.device_layer():
            answers: list[Any] = library.get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(parts),
                model=self.stages,
                num_microbatches=len(parts),
                seq_length=self.cfg.actor.micro_batch_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return answers

    def _scores(self, hidden: Tensor, batch: PackedBatch, model: Any, entropy: bool) -> Scores:
        """Return the scores of a micro-batch from its last hidden states [L, 1, H]."""
        scores = hidden_scores(
            hidden.transpose(0, 1),
            model.output_weight,
            batch.rows.input_ids,
            temperature=self.cfg.rollout.sampling.temperature,
            mask=batch.mask,
            cu_seqlens=batch.layout.cu_seqlens,
            entropy=entropy,
        )
        log_probs = unpack_rows(scores.log_probs, batch.rows, width=batch.width)
        entropies = log_probs if scores.entropy is None else unpack_rows(scores.entropy, batch.rows, width=batch.width)
        return Scores(log_probs, entropies)

    def _pack(self, rows: StepRows) -> PackedBatch:
        columns = rows.columns
        return PackedBatch.of(columns.input_ids, rows.lengths, columns.loss_mask, self.compute_device)

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its starting weights. Raises RuntimeError where the loss has no KL term."""
        if self._reference is None:
            raise RuntimeError(
                "the reference policy is kept only with algorithm.loss.klCoefficient above 0, got 0; set it"
            )
        return self._reference.swapped()
