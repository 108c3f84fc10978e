"""Runs a language model under megatron-core, whose schedules take the micro-batches through the pipeline stages.

Legend: B rows of a micro-batch, T tokens of its longest row, L packed tokens of it, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.backend import DetachedScores, Objective, Proceed, Scores, StepCancelled, TrainBackend
from rl_core.actors.forward import PackedBatch, TokenNumbers
from rl_core.actors.megatron import library
from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.actors.megatron.packing import PackedSequenceParams
from rl_core.actors.rows import StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.logprobs import hidden_scores, hidden_values
from rl_core.algorithms.score_functions import VocabularyShard
from rl_core.algorithms.stats import Stat
from rl_core.batching.packing import unpack_rows

Finish = Callable[[StepRows, TokenNumbers], Any]
"""Computes the result of a micro-batch from its per-token numbers. It is called on the ranks of the last pipeline stage only."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which numbers per token a forward pass computes."""

    log_probs: bool = True
    values: bool = False
    entropy: bool = False


class MegatronBackend(TrainBackend):
    """The train backend of megatron-core.

    The ranks of one replica (tensor and pipeline parallel) train the same rows. Those of the last stage compute the scores and the loss.
    """

    def __init__(self, manager: MegatronModelManager) -> None:
        """Run the model of `manager`, which may be set up later."""
        self.manager: MegatronModelManager = manager

    def forward_backward(
        self, micro_batches: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Accumulate the gradients of all micro-batches; return the objective's statistics of each. See TrainBackend."""
        manager = self.manager
        micro_batches = self._whole_rounds(micro_batches)
        # megatron divides the loss by the number of micro-batches and averages gradients over data ranks, but shares must be summed.
        scale = len(micro_batches) * manager.ranks.data_size

        def loss(rows: StepRows, numbers: TokenNumbers) -> tuple[Tensor, dict[str, Stat]]:
            assert numbers.log_probs is not None and numbers.entropy is not None
            scores = Scores(numbers.log_probs, numbers.entropy, numbers.values, numbers.candidates)
            result = objective(scores, rows.columns.to(manager.compute_device), normalizers)
            return result.loss * scale, result.metrics

        manager.residency.load_gradients()
        try:
            outputs = Outputs(values=manager.has_critic, entropy=True)
            stats: list[dict[str, Stat]] = self._run(micro_batches, loss, outputs, proceed)
        except StepCancelled:
            manager.drop_gradients()
            raise
        return stats if manager.cut.rank == 0 else []

    def score_rows(
        self, micro_batches: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[DetachedScores]:
        """Return the requested scores of each micro-batch. See TrainBackend."""
        outputs = Outputs(log_probs=log_probs, values=values)
        with torch.no_grad():
            scored: list[DetachedScores] = self._run(
                self._whole_rounds(micro_batches),
                lambda rows, numbers: DetachedScores(numbers.log_probs, numbers.values),
                outputs,
                proceed,
                forward_only=True,
            )
        scored = DetachedScores.on_cpu(scored[: len(micro_batches)])
        return self._from_last_stage(scored, micro_batches, outputs)

    def _whole_rounds(self, micro_batches: Sequence[StepRows]) -> list[StepRows]:
        """Return the micro_batches, followed by masked ones up to a multiple of the stages where the pipeline schedule is interleaved."""
        parallel = self.manager.parallel
        num_masked = -len(micro_batches) % parallel.pipeline if parallel.virtual_pipeline is not None else 0
        return [*micro_batches, *(micro_batches[0].masked_row() for _ in range(num_masked))]

    def _from_last_stage(
        self, scored: list[DetachedScores], micro_batches: Sequence[StepRows], outputs: Outputs
    ) -> list[DetachedScores]:
        """Broadcast the scores of the last stage to all stages, which compute masks and weights of the step from them.

        `scored` is [] on the other stages.
        """
        if self.manager.parallel.pipeline == 1:
            return scored
        shapes = [rows.columns.input_ids.shape for rows in micro_batches]
        absent: list[Tensor | None] = [None] * len(micro_batches)
        log_probs = _broadcast([s.log_probs for s in scored], shapes) if outputs.log_probs else absent
        values = _broadcast([s.values for s in scored], shapes) if outputs.values else absent
        return [DetachedScores(*pair) for pair in zip(log_probs, values, strict=True)]

    def _run(
        self,
        micro_batches: Sequence[StepRows],
        finish: Finish,
        outputs: Outputs,
        proceed: Proceed,
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run megatron's schedule over `micro_batches`; return what `finish` returned for each: the statistics beside a loss, or the result."""
        manager = self.manager
        manager.residency.require_loaded("a forward pass")
        if manager.parallel.pipeline > 1:
            proceed()  # Once for all micro_batches: stages are in different micro-batches and could not leave the schedule together.
            proceed = _continue
        longest = max(
            sum(-(-length // self._multiple) * self._multiple for length in rows.lengths) for rows in micro_batches
        )
        decoders = manager.stages[0].module.decoders(log_probs=outputs.log_probs, values=outputs.values)
        with manager.device_context(), manager.dropout_context(forward_only=forward_only):
            results: list[Any] = library.get_forward_backward_func()(
                forward_step_func=partial(
                    self._forward_step, finish=finish, outputs=outputs, proceed=proceed, longest=longest
                ),
                data_iterator=[iter(micro_batches) for _ in manager.stages],
                model=manager.stages,
                num_microbatches=len(micro_batches),
                seq_length=longest,
                micro_batch_size=len(decoders),
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results

    def _forward_step(
        self,
        row_iterator: Iterator[StepRows],
        stage: Any,
        *,
        finish: Finish,
        outputs: Outputs,
        proceed: Proceed,
        longest: int,
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Run one pipeline stage over the next micro-batch; `longest` is the number of tokens of the longest one.

        Returns the hidden states of the stage and a function of the last stage's, which the schedule calls for the result.
        """
        proceed()
        rows = next(row_iterator)
        batch = self._pack(rows)
        hidden = stage(
            input_ids=batch.rows.input_ids,
            position_ids=batch.rows.position_ids,
            attention_mask=None,
            packed_seq_params=PackedSequenceParams.of(batch),
            tokens=sum(batch.layout.lengths) // self._multiple,
            sent=longest // self._multiple,
            log_probs=outputs.log_probs,
            values=outputs.values,
        )

        def result(hidden: Tensor, non_loss_data: bool = False) -> Any:
            return finish(rows, self._numbers(hidden, batch, stage.module, outputs))

        return hidden, result

    def _numbers(self, hidden: Tensor, batch: PackedBatch, model: Any, outputs: Outputs) -> TokenNumbers:
        """Compute the per-token numbers of a micro-batch from the last hidden states [L, n, H]; n is 2 with a separate critic, else 1.

        Under sequence parallelism each tensor rank has its share of the L tokens.
        """
        manager = self.manager
        if manager.parallel.sequence:
            # The gradient of the log-probabilities is summed over the tensor ranks already; that of the values is whole on each rank.
            hidden = library.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.transpose(0, 1)
        packed: list[Tensor | None] = [None, None, None, None]
        if outputs.log_probs:
            policy_hidden, head = hidden[:1], model.output_weight
            if manager.cfg.model.float32_head:
                policy_hidden, head = policy_hidden.float(), head.float()
            scores = hidden_scores(
                policy_hidden,
                head,
                batch.rows.input_ids,
                temperature=manager.cfg.rollout.sampling.temperature,
                targets=batch.targets,
                entropy=outputs.entropy,
                candidates=batch.candidates,
                shard=self._shard(),
            )
            packed = [scores.log_probs, scores.entropy, None, scores.candidates]
        if outputs.values:
            packed[2] = hidden_values(hidden[-1:], model.head_weight, targets=batch.targets)
        return TokenNumbers(
            *(None if tensor is None else unpack_rows(tensor, batch.rows, width=batch.width) for tensor in packed)
        )

    def _shard(self) -> VocabularyShard | None:
        """Return this rank's part of the vocabulary; None when it has all of it."""
        cut = self.manager.cut
        if cut.ranks == 1:
            return None
        group = library.parallel_state.get_tensor_model_parallel_group()
        return VocabularyShard(
            start=cut.rank * (cut.padded_vocabulary // cut.ranks),
            tokens=cut.tokens,
            largest=lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group),
            total=lambda tensor: dist.all_reduce(tensor, group=group),
        )

    @property
    def _multiple(self) -> int:
        """Over how many tensor ranks the tokens of a micro-batch are divided. Rows are padded to a multiple of it."""
        parallel = self.manager.parallel
        return parallel.tensor if parallel.sequence else 1

    def _pack(self, rows: StepRows) -> PackedBatch:
        columns = rows.columns
        return PackedBatch.of(
            columns.input_ids,
            rows.lengths,
            columns.loss_mask,
            self.manager.compute_device,
            candidates=columns.candidates,
            multiple=self._multiple,
            attention=self.manager.cfg.actor.attention,
        )


def _continue() -> None:
    """Do nothing: a pipeline schedule that has begun is not interrupted."""


def _broadcast(tensors: Sequence[Tensor | None], shapes: Sequence[torch.Size]) -> list[Tensor | None]:
    """Return `tensors` of the last pipeline stage, which have these `shapes`, on all stages; the others pass none."""
    state = library.parallel_state
    sizes = [shape.numel() for shape in shapes]
    flat = torch.cat([t.reshape(-1) for t in tensors if t is not None]) if tensors else torch.empty(sum(sizes))
    dist.broadcast(flat, state.get_pipeline_model_parallel_last_rank(), group=state.get_pipeline_model_parallel_group())
    return [values.view(shape) for values, shape in zip(flat.split(sizes), shapes, strict=True)]
