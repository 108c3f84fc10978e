"""One training step: its rows, mini-batches, global normalizers, early stop, cancellation and metrics.

    load -> compute_log_probs -> compute_advantages -> train

StepEngine decides what is trained and the backend how: it passes micro-batches to the backend and never handles a module or a gradient. All
methods except `cancel` and `load` are collective over the ranks and run on one thread.
"""

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.actors import preparation
from rl_core.actors.backend import DetachedScores, Objective, StepCancelled, TrainBackend
from rl_core.actors.cancellation import Cancellation
from rl_core.actors.critic_group import CriticGroup
from rl_core.actors.objective import PolicyObjective
from rl_core.actors.preparation import PreparedBatch
from rl_core.actors.ranks import Ranks
from rl_core.actors.reporting import StepMetrics
from rl_core.actors.rows import Columns, StepRows, move_rows, natural_key, number_rows
from rl_core.actors.step_plan import plan_pass
from rl_core.actors.step_samples import StepSampler
from rl_core.actors.teachers import TeacherScores
from rl_core.algorithms.aggregation import count_normalizers
from rl_core.algorithms.stats import Stat
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.batching.microbatch import plan_microbatches
from rl_core.transports import frames


class StepEngine:
    """Runs the training steps of a run on one rank, and holds the prompt groups of the current step.

    The ranks that train the same rows form a replica. One rank of a replica receives the groups. The first method of a step broadcasts them
    to the others.
    """

    def __init__(
        self,
        backend: TrainBackend,
        ranks: Ranks,
        algorithm: AlgorithmSpec,
        *,
        micro_batch_tokens: int,
        response_limit: int,
        balance: bool = True,
        kept_groups: int = 0,
        progress: Callable[[], None] = lambda: None,
        teachers: Callable[[TrainingBatch, Sequence[PromptGroupRecord]], TeacherScores] | None = None,
        inference: Callable[[TrainingBatch, int], Tensor | None] | None = None,
        critic: CriticGroup | None = None,
    ) -> None:
        """Run steps of `algorithm` with `backend` on this rank of `ranks`.

        - `micro_batch_tokens`: largest number of tokens per forward pass.
        - `response_limit`: largest number of generated tokens of a row, over all turns.
        - `balance`: assign rows to ranks by cost, otherwise in order.
        - `progress`: called before each micro-batch in training.
        - `teachers`: returns the teachers' scores of a batch; None in a job without distillation.
        - `inference`: returns the old log-probabilities of a batch at a version of the weights, [B, S], or None when the backend has to compute
          them; None in a job without a group for that.
        - `critic`: the group that holds the critic; None where the backend does, or there is none.
        """
        self._backend, self._model = backend, backend.manager
        self._ranks, self._algorithm = ranks, algorithm
        self._micro_batch_tokens, self._response_limit = micro_batch_tokens, response_limit
        self._balance, self._progress = balance, progress
        self._teachers, self._inference, self._critic = teachers, inference, critic
        self._objective = PolicyObjective(algorithm, max_tokens=response_limit)
        self._cancellation = Cancellation(ranks)
        self._reduce = ranks.sum_over_data_ranks if ranks.data_size > 1 else None
        self.sampler = StepSampler(kept_groups * algorithm.group_size) if kept_groups else None
        self._records: list[PromptGroupRecord] = []
        """The step's groups as this rank received them."""
        self.prepared: PreparedBatch | None = None
        """The step's groups on this rank. None before `load` and after the step was trained or cancelled."""
        self._fallbacks = 0
        """Steps whose old log-probabilities the backend computed in place of the inference group."""
        self._not_broadcast: list[PromptGroupRecord] | None = None
        """Groups that this rank received and has not broadcast to the other ranks of its replica yet."""

    # Groups and what the loss needs of them ---------------------------------------------------------------------------

    def load(self, records: Iterable[PromptGroupRecord], *, version: int = 0) -> None:
        """Set `records` as this rank's groups of the step, in any order. Not collective.

        `version` is the version of the weights that the step will train. Raises DataError for a malformed sample or one that is too long.
        """
        self._objective.version = version
        ordered = sorted(records, key=lambda record: natural_key(record.group_id))
        limits = {"max_length": self._model.max_length, "micro_batch_tokens": self._micro_batch_tokens}
        age_version = version if self._algorithm.needs_ages else None
        self.prepared = preparation.collate(ordered, version=age_version, **limits)
        self._not_broadcast = self._records = ordered
        self._forget_samples()
        self._cancellation.begin()

    def begin(self) -> None:
        """Begin a step whose rows are loaded later, by `load_prepared`: from now on a request to cancel it has an effect. Not collective."""
        self._cancellation.begin()

    def load_prepared(self, prepared: PreparedBatch, *, version: int = 0) -> None:
        """Set the rows of the step where all that the loss needs of them is known already. Not collective.

        They are rows of a policy that is no language model. `version` is as for `load`. Call `begin` before.
        """
        self._objective.version = version
        self.prepared = prepared
        self._records = []

    def compute_log_probs(self) -> None:
        """Compute what the loss needs for the step's groups.

        These are log-probabilities of the trainer, of the reference policy and of the teachers, and values of the critic. If the step is cancelled
        meanwhile, its groups are dropped.
        """
        prepared, algorithm = self._require_batch("compute_log_probs"), self._algorithm
        requested = {"log_probs": algorithm.recompute_log_probs, "values": algorithm.critic_of_actor is not None}
        try:
            if requested["log_probs"] and self._inference is not None:
                prepared.old_log_probs = self._ask_inference(prepared.collated)
                fallbacks = torch.tensor(float(self._fallbacks))
                prepared.metrics["inference_fallbacks"] = Stat("mean", fallbacks, torch.tensor(1.0))
                requested["log_probs"] = prepared.old_log_probs is None
            if self._critic is not None:
                prepared.values = self._ask_critic(prepared.collated)
            if any(requested.values()):
                log_probs, values = self._scored(prepared.collated, **requested)
                prepared.old_log_probs = log_probs if requested["log_probs"] else prepared.old_log_probs
                prepared.values = values if requested["values"] else prepared.values
            if algorithm.needs_reference:
                prepared.ref_log_probs = self.score_reference(prepared.collated)
            if self._teachers is not None:
                prepared.teacher = self._ask_teachers(prepared.collated)
        except StepCancelled:
            self._discard_step()

    def compute_advantages(self) -> dict[str, float]:
        """Compute the advantages of the step's groups; return this rank's metrics of rewards, groups and advantages."""
        prepared = self._require_batch("compute_advantages_and_returns")
        lacks_reference = prepared.ref_log_probs is None and self._algorithm.needs_reference
        lacks_teacher = prepared.teacher is None and self._teachers is not None
        if lacks_reference or lacks_teacher or (prepared.values is None and self._algorithm.critic_in_use is not None):
            self.compute_log_probs()
        with self._ranks.guard("computing advantages"):
            preparation.prepare_for_loss(
                prepared, self._algorithm, max_new_tokens=self._response_limit, reduce=self._reduce
            )
        if self._critic is not None and self._ranks.receives:
            self._critic.give_returns(prepared, self._objective.version, self._ranks.data_rank)
        return {name: float(stat) for name, stat in prepared.metrics.items()}

    def _ask_critic(self, batch: TrainingBatch) -> Tensor:
        """Return the values of `batch` from the group that holds the critic."""
        assert self._critic is not None
        answer = [self._critic.values(batch, self._objective.version)] if self._ranks.receives else None
        (values,) = self._in_replica(answer, "handing out the values of the critic")
        assert values is not None
        return values

    def _in_replica(self, tensors: Sequence[Tensor | None] | None, doing: str) -> Sequence[Tensor | None]:
        """Broadcast the `tensors` of the first rank of the replica to all its ranks and return them. `doing` is for error messages."""
        if self._ranks.replica_size == 1:
            assert tensors is not None
            return tensors
        with self._ranks.guard(doing):
            answer = self._ranks.broadcast_in_replica(None if tensors is None else _packed(list(tensors)))
        assert answer is not None
        return [None if part is None else torch.as_tensor(part) for part in _unpacked(answer)]

    def _ask_teachers(self, batch: TrainingBatch) -> TeacherScores:
        """Return the teachers' scores of `batch`. One rank of a replica asks, and the others get its answer."""
        assert self._teachers is not None
        scores = self._teachers(batch, self._records) if self._ranks.receives else None
        return TeacherScores(*self._in_replica(scores, "handing out the teachers' answers"))

    def _ask_inference(self, batch: TrainingBatch) -> Tensor | None:
        """Return the old log-probabilities from the inference group; None on all ranks when one of them got no answer."""
        assert self._inference is not None
        log_probs = self._inference(batch, self._objective.version) if self._ranks.receives else None
        with self._ranks.guard("handing out the answers of the inference group"):
            answer = self._ranks.broadcast_in_replica(None if log_probs is None else _packed([log_probs]))
            unanswered = torch.tensor(float(answer is None))
            if self._reduce is not None:
                unanswered = self._reduce(unanswered)
        if answer is None or unanswered > 0:
            self._fallbacks += 1
            return None
        return torch.as_tensor(_unpacked(answer)[0])

    def score(self, batch: TrainingBatch) -> Tensor:
        """Return the trainer's log-probabilities of `batch`, [B, S] float32; zeros on a rank that computes none.

        Raises StepCancelled.
        """
        log_probs, _ = self._scored(batch, log_probs=True, values=False)
        assert log_probs is not None
        return log_probs

    def _scored(self, batch: TrainingBatch, *, log_probs: bool, values: bool) -> DetachedScores:
        """Return the requested scores of `batch`, [B, S] each; zeros on a rank that gets none from the backend."""
        lengths = batch.lengths.tolist()
        columns = Columns(input_ids=batch.input_ids, loss_mask=batch.loss_mask)
        rows = StepRows(numbers=list(range(len(lengths))), lengths=lengths, columns=columns)
        with self._ranks.guard("scoring"):
            micro_batches = self._cut(lengths)
            scored_parts = self._backend.score_rows(
                _rows_of_micro_batches(rows, micro_batches),
                proceed=self._cancellation.check,
                log_probs=log_probs,
                values=values,
            )
        scored = DetachedScores(
            *(torch.zeros(batch.input_ids.shape) if is_requested else None for is_requested in (log_probs, values))
        )
        for indices, micro_scores in zip(micro_batches, scored_parts, strict=bool(scored_parts)):
            for destination, tokens in zip(scored, micro_scores, strict=True):
                if indices and destination is not None and tokens is not None:
                    destination[indices, : tokens.shape[1]] = tokens
        return scored

    def score_reference(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's log-probabilities of `batch`, [B, S] float32. The trained weights are unchanged afterwards."""
        with self._model.reference():
            return self.score(batch)

    # Training ---------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel the step before its next micro-batch. May be called from any thread; a call on one rank is enough.

        Only the first mini-batch of a step can be cancelled. Once a mini-batch has updated the weights, the rest of the step is trained
        too, because the runner's ledger counts whole steps. It is also too late after the last micro-batch, when only the optimizer step is
        left.
        """
        self._cancellation.request()

    def train(self, step: int) -> dict[str, float] | None:
        """Train on the groups of the step. If `compute_advantages` was not called, this method calls it first.

        Returns the metrics of the step over all ranks, equal on each, or None if the step was cancelled. Raises RuntimeError if there are no
        groups, InfrastructureError if a rank is lost, and DataError after too many consecutive gradients that were not finite.
        """
        prepared = self._require_batch("run_training")
        if prepared.advantages is None:
            self.compute_advantages()
        columns = prepared.columns(decoupled=self._algorithm.loss.name == "decoupled_ppo")
        started = time.perf_counter()
        batch, report = prepared.batch, StepMetrics(self._model.counts)
        if self._ranks.receives:  # once for all ranks that train the same rows
            report.add(prepared.metrics)
        try:
            with self._ranks.guard("training"):
                lengths = batch.lengths.tolist()
                all_lengths, numbers = number_rows(self._ranks, batch.group_texts, batch.group_ids.tolist(), lengths)
                if self.sampler is not None and self._ranks.receives:
                    self.sampler.remember(prepared, self._records, numbers)
                rows = StepRows(numbers=numbers, lengths=lengths, columns=columns, inputs=prepared.inputs)
                for epoch in range(self._algorithm.update_epochs):
                    if report.early_stopped:
                        break
                    self._train_pass(rows, all_lengths, step, epoch, report)
                seconds = time.perf_counter() - started
                metrics = report.finish(self._ranks, tokens=sum(all_lengths), seconds=seconds)
        except StepCancelled:
            self._discard_step()
            return None
        self.prepared, self._records = None, []
        return metrics

    def _train_pass(self, rows: StepRows, lengths: list[int], step: int, epoch: int, report: StepMetrics) -> None:
        """Train once on all rows of the step. `lengths` has the length of each row by number; `rows` are those this rank received."""
        algorithm = self._algorithm
        plan = plan_pass(
            lengths,
            minibatches=algorithm.optimizer_steps_per_batch,
            ranks=self._ranks.data_size,
            hidden_size=self._model.hidden_size,
            balance=self._balance,
            seed=(algorithm.seed, step, epoch),
        )
        report.imbalance = plan.imbalance
        own_rows = move_rows(self._ranks, rows, plan.destination)
        single_rank = self._ranks.data_size == 1  # row numbers are then positions
        position = {} if single_rank else dict(zip(own_rows.numbers, range(len(own_rows.numbers)), strict=True))
        for minibatch in plan.minibatches:
            row_numbers = minibatch[self._ranks.data_rank]
            self._train_minibatch(
                own_rows.take(row_numbers if single_rank else [position[number] for number in row_numbers]), report
            )
            if report.exceeds(self._ranks, ratio=algorithm.max_policy_ratio, kl=algorithm.max_policy_kl):
                break

    def _train_minibatch(self, rows: StepRows, report: StepMetrics) -> None:
        """Run one optimizer step over `rows` of this rank and the rows that the other ranks pass."""
        normalizers = count_normalizers(rows.columns.loss_mask, reduce=self._reduce)
        if normalizers.tokens == 0:
            self._model.counts.empty += 1
            return
        micro_batches = self._cut(rows.lengths)
        report.add({"perf/padding_waste": _padding_waste(rows.lengths, micro_batches)})

        def proceed() -> None:
            if report.nothing_ended:
                self._cancellation.check()
            self._progress()

        objective: Objective = self._objective.with_mismatch_metrics if report.nothing_ended else self._objective
        micro_batch_rows = _rows_of_micro_batches(rows, micro_batches)
        if self.sampler is not None:
            objective = self.sampler.watching(objective, micro_batch_rows)
        with report.timing("forward_backward"):
            stats = self._backend.forward_backward(micro_batch_rows, objective, normalizers, proceed=proceed)
        with report.timing("optimizer"):
            norm, rates = self._model.optimizer_step()
        report.add_step(stats, norm=norm, rate=rates[0])

    def _cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the micro-batches of this rank's rows, as many as on the other ranks; the rows of each are sorted longest first."""
        agree = self._ranks.all_reduce_max if self._ranks.data_size > 1 else None
        micro_batches = plan_microbatches(lengths, token_budget=self._micro_batch_tokens, agree=agree)
        if min(lengths, default=1) == max(lengths, default=1):
            return micro_batches
        sizes = np.asarray(lengths, np.int64)
        # Rows of like length side by side make attention's dense batches tight.
        return [
            np.array(indices, np.int64)[np.argsort(-sizes[indices], kind="stable")].tolist()
            for indices in micro_batches
        ]

    def _discard_step(self) -> None:
        self.prepared, self._records = None, []
        self._forget_samples()
        self._cancellation.restore()

    def _forget_samples(self) -> None:
        if self.sampler is not None:
            self.sampler.clear()

    def _require_batch(self, method: str) -> PreparedBatch:
        """Return the step's groups, after they were broadcast to all ranks of the replica."""
        with self._ranks.guard("handing out the step's groups"):
            self._broadcast_groups()
        if self.prepared is None:
            raise RuntimeError(f"{method} needs the step's groups, got none; call recv_batch or load_batch first")
        return self.prepared

    def _broadcast_groups(self) -> None:
        """Broadcast the received groups to the other ranks of the replica, once per step."""
        if self._ranks.replica_size == 1:
            return
        message: bytes | None = None
        if self._ranks.receives and self.prepared is not None:
            message = b"" if self._not_broadcast is None else _packed([self._objective.version, self._not_broadcast])
        received = self._ranks.broadcast_in_replica(message)
        if not self._ranks.receives and received is None:
            self.prepared = None
        elif not self._ranks.receives and received:
            version, records = _unpacked(received)
            self.load(records, version=version)
        self._not_broadcast = None


def _packed(message: object) -> bytes:
    """Return a message as one byte string: the number of its frames, their sizes, then the frames."""
    parts = [bytes(part) for part in frames.encode(message)]
    return b"".join([struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts)), *parts])


def _unpacked(data: bytes) -> Any:
    (count,) = struct.unpack_from("<q", data)
    offset, parts = 8 * (count + 1), []
    for size in struct.unpack_from(f"<{count}q", data, 8):
        parts.append(data[offset : offset + size])
        offset += size
    return frames.decode(parts, copy=True)


def _rows_of_micro_batches(rows: StepRows, micro_batches: Sequence[Sequence[int]]) -> list[StepRows]:
    """Return the rows of each micro-batch. An empty micro-batch becomes one masked row, so that all ranks run equally many passes."""
    return [rows.take(indices) if indices else rows.masked_row() for indices in micro_batches]


def _padding_waste(lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> Stat:
    """Return the share of the computed tokens that belong to no row. Packed rows have no padding; an empty micro-batch has one token."""
    idle = float(sum(not indices for indices in micro_batches))
    return Stat("mean", idle, idle + float(sum(lengths)))
