"""The train backend of language models under megatron-core: micro-batches through its schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.backend import Objective, Proceed, Scores, StepCancelled
from rl_core.actors.forward import PackedBatch
from rl_core.actors.megatron import library
from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.actors.megatron.packing import Packing
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.logprobs import hidden_scores
from rl_core.algorithms.score_functions import VocabularyShard
from rl_core.algorithms.stats import Stat
from rl_core.batching.packing import unpack_rows

Answer = Callable[[StepRows, Scores], Any]
"""Made of a micro-batch's scores on a rank that has them."""


class MegatronBackend(MegatronModelManager):
    """A TrainBackend. Ranks of one replica (tensor, pipeline) train the same rows; the last stage's have scores and a loss."""

    def forward_backward(
        self, parts: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Add the gradients of all `parts`; return the objective's statistics of each. See TrainBackend."""
        parts = self._whole_rounds(parts)
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
            scored: list[Tensor] = self._run(
                self._whole_rounds(parts), log_probs, proceed, entropy=False, forward_only=True
            )
        return self._from_last_stage(scored, parts)

    def _whole_rounds(self, parts: Sequence[StepRows]) -> list[StepRows]:
        """Return the parts, with masked ones after them where interleaved stages take as many at a time as there are stages."""
        missing = -len(parts) % self.parallel.pipeline if self.parallel.virtual_pipeline is not None else 0
        return [*parts, *(parts[0].masked_row() for _ in range(missing))]

    def _from_last_stage(self, scored: list[Tensor], parts: Sequence[StepRows]) -> list[Tensor]:
        """Return what the last stage scored, on all stages: masks and weights of the step follow from it."""
        if self.parallel.pipeline == 1:
            return scored
        shapes = [rows.columns.input_ids.shape for rows in parts]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.cat([one.reshape(-1) for one in scored[: len(parts)]]) if scored else torch.empty(sum(sizes))
        state = library.parallel_state
        group = state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, state.get_pipeline_model_parallel_last_rank(), group=group)
        return [one.view(shape) for one, shape in zip(flat.split(sizes), shapes, strict=True)]

    def _run(
        self, parts: Sequence[StepRows], answer: Answer, proceed: Proceed, *, entropy: bool, forward_only: bool = False
    ) -> list[Any]:
        """Run the schedule over `parts`; return what `answer` gave for each, its loss aside."""
        self._require_loaded("a forward pass")
        in_stages = self.parallel.pipeline > 1
        if in_stages:
            proceed()  # once: stages that are in different micro-batches cannot leave together

        def step(rows_left: Iterator[StepRows], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
            if not in_stages:
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
                data_iterator=[iter(parts) for _ in self.stages],
                model=self.stages,
                num_microbatches=len(parts),
                seq_length=self.cfg.actor.micro_batch_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return answers

    def _scores(self, hidden: Tensor, batch: PackedBatch, model: Any, entropy: bool) -> Scores:
        """Return the scores of a micro-batch from its last hidden states [L, 1, H], of which each tensor rank may have a part."""
        if self.parallel.sequence:
            # The gradient of the scores is summed over the tensor ranks already.
            hidden = library.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        scores = hidden_scores(
            hidden.transpose(0, 1),
            model.output_weight,
            batch.rows.input_ids,
            temperature=self.cfg.rollout.sampling.temperature,
            mask=batch.mask,
            cu_seqlens=batch.layout.cu_seqlens,
            entropy=entropy,
            shard=self._shard(),
        )
        log_probs = unpack_rows(scores.log_probs, batch.rows, width=batch.width)
        entropies = log_probs if scores.entropy is None else unpack_rows(scores.entropy, batch.rows, width=batch.width)
        return Scores(log_probs, entropies)

    def _shard(self) -> VocabularyShard | None:
        """Return this rank's part of the vocabulary; None where it has all of it."""
        cut = self.cut
        if cut.ranks == 1:
            return None
        group = library.parallel_state.get_tensor_model_parallel_group()
        return VocabularyShard(
            start=cut.rank * (cut.padded_vocabulary // cut.ranks),
            tokens=cut.tokens,
            largest=lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group),
            total=lambda tensor: dist.all_reduce(tensor, group=group),
        )

    def _pack(self, rows: StepRows) -> PackedBatch:
        columns = rows.columns
        multiple = self.parallel.tensor if self.parallel.sequence else 1
        return PackedBatch.of(
            columns.input_ids, rows.lengths, columns.loss_mask, self.compute_device, multiple=multiple
        )
