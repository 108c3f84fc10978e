"""The train backend of language models under megatron-core: micro-batches through its schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.backend import Objective, Proceed, Scored, Scores, StepCancelled
from rl_core.actors.forward import PackedBatch, TokenNumbers
from rl_core.actors.megatron import library
from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.actors.megatron.packing import Packing
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.logprobs import hidden_scores, hidden_values
from rl_core.algorithms.score_functions import VocabularyShard
from rl_core.algorithms.stats import Stat
from rl_core.batching.packing import unpack_rows

Answer = Callable[[StepRows, TokenNumbers], Any]
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

        def loss(rows: StepRows, found: TokenNumbers) -> tuple[Tensor, dict[str, Stat]]:
            assert found.log_probs is not None and found.entropy is not None
            scores = Scores(found.log_probs, found.entropy, found.values)
            result = objective(scores, rows.columns.to(self.compute_device), normalizers)
            return result.loss * scale, result.metrics

        if self.is_grad_offloaded:
            self._zero_gradients()
            self.is_grad_offloaded = False
        try:
            stats: list[dict[str, Stat]] = self._run(parts, loss, proceed, entropy=True, values=self.has_critic)
        except StepCancelled:
            self.drop_gradients()
            raise
        return stats if self.cut.rank == 0 else []

    def score_rows(
        self, parts: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[Scored]:
        """Return what was asked for of each part. See TrainBackend."""

        def answer(rows: StepRows, found: TokenNumbers) -> Scored:
            return Scored(*(None if one is None else one.cpu() for one in (found.log_probs, found.values)))

        with torch.no_grad():
            scored: list[Scored] = self._run(
                self._whole_rounds(parts), answer, proceed, log_probs=log_probs, values=values, forward_only=True
            )
        return self._from_last_stage(scored[: len(parts)], parts, (log_probs, values))

    def _whole_rounds(self, parts: Sequence[StepRows]) -> list[StepRows]:
        """Return the parts, with masked ones after them where interleaved stages take as many at a time as there are stages."""
        missing = -len(parts) % self.parallel.pipeline if self.parallel.virtual_pipeline is not None else 0
        return [*parts, *(parts[0].masked_row() for _ in range(missing))]

    def _from_last_stage(
        self, scored: list[Scored], parts: Sequence[StepRows], wanted: tuple[bool, bool]
    ) -> list[Scored]:
        """Return what the last stage scored on all stages: masks and weights of the step follow from it."""
        if self.parallel.pipeline == 1:
            return scored
        state = library.parallel_state
        last, group = state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
        shapes = [rows.columns.input_ids.shape for rows in parts]
        sizes = [shape.numel() for shape in shapes]

        def told(numbers: list[Tensor]) -> list[Tensor]:
            flat = torch.cat([one.reshape(-1) for one in numbers]) if numbers else torch.empty(sum(sizes))
            dist.broadcast(flat, last, group=group)
            return [one.view(shape) for one, shape in zip(flat.split(sizes), shapes, strict=True)]

        columns = [
            told([one[at] for one in scored]) if asked else [None] * len(parts) for at, asked in enumerate(wanted)
        ]
        return [Scored(*one) for one in zip(*columns, strict=True)]

    def _run(
        self,
        parts: Sequence[StepRows],
        answer: Answer,
        proceed: Proceed,
        *,
        log_probs: bool = True,
        values: bool = False,
        entropy: bool = False,
        forward_only: bool = False,
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
                log_probs=log_probs,
                values=values,
            )
            return hidden, partial(finish, rows, batch, stage)

        def finish(rows: StepRows, batch: PackedBatch, stage: Any, hidden: Tensor, non_loss_data: bool = False) -> Any:
            wanted = {"log_probs": log_probs, "values": values, "entropy": entropy}
            return answer(rows, self._numbers(hidden, batch, stage.module, **wanted))

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

    def _numbers(
        self, hidden: Tensor, batch: PackedBatch, model: Any, *, log_probs: bool, values: bool, entropy: bool
    ) -> TokenNumbers:
        """Return the numbers of a micro-batch from its last hidden states [L, n, H], of which each tensor rank may have a part.

        n is 1, or 2 where a critic of its own ran beside the policy.
        """
        if self.parallel.sequence:
            # The gradient of the scores is summed over the tensor ranks already, that of the values is whole on each.
            hidden = library.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.transpose(0, 1)
        packed: list[Tensor | None] = [None, None, None]
        if log_probs:
            scores = hidden_scores(
                hidden[:1],
                model.output_weight,
                batch.rows.input_ids,
                temperature=self.cfg.rollout.sampling.temperature,
                mask=batch.mask,
                cu_seqlens=batch.layout.cu_seqlens,
                entropy=entropy,
                shard=self._shard(),
            )
            packed[:2] = scores.log_probs, scores.entropy
        if values:
            packed[2] = hidden_values(
                hidden[-1:], model.head_weight, mask=batch.mask, cu_seqlens=batch.layout.cu_seqlens
            )
        return TokenNumbers(
            *(None if one is None else unpack_rows(one, batch.rows, width=batch.width) for one in packed)
        )

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
