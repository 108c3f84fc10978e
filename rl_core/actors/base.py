"""The order of a training step, the same for every backend (trainers.md 6).

    recv_batch -> compute_log_probs -> compute_advantages_and_returns -> run_training -> sync_model_to_rollout

A backend derives from `Actor` and supplies the model: score rows, run before each micro-batch, step the optimizer.
All methods are collective over the actor's ranks; the runner calls them on all of them in the same order. `cancel_training` alone may
come at any time: the step is then left between two micro-batches, as if it had never begun.

Legend: B rows, T width of the longest.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rl_core.actors import preparation
from rl_core.actors.cancellation import Cancellation, StepCancelled
from rl_core.actors.intake import GroupIntake, group_entry, rollout_metrics
from rl_core.actors.objective import PolicyObjective
from rl_core.actors.offload import Offloader
from rl_core.actors.preparation import PreparedBatch
from rl_core.actors.ranks import Ranks
from rl_core.actors.reporting import StepReport
from rl_core.actors.rows import StepRows, lay_out, move_rows, natural_key
from rl_core.actors.schedule import LRSchedule, OptimizerCounts
from rl_core.actors.step_plan import plan_epoch
from rl_core.algorithms.aggregation import count_normalizers
from rl_core.algorithms.stats import Stat
from rl_core.api.job import RLJobSpec
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.batching.microbatch import plan_microbatches
from rl_core.workers.worker import Worker

__all__ = ["Actor", "LRSchedule", "Offloader", "OptimizerCounts"]


class Actor(Worker, ABC):
    """A rank that trains on whole prompt groups."""

    cfg: RLJobSpec
    ranks: Ranks
    model: nn.Module
    counts: OptimizerCounts
    compute_device: torch.device
    global_step: int
    """Step of the last training; the weights' version."""

    def __init__(self) -> None:
        algorithm = self.cfg.algorithm
        self.prepared: PreparedBatch | None = None
        """The step's groups on this rank, from recv_batch until run_training."""
        self.response_limit = self.cfg.rollout.sampling.max_new_tokens * self.cfg.env.max_turns
        self.objective = PolicyObjective(algorithm, max_tokens=self.response_limit)
        self.cancellation = Cancellation(self.ranks)

    # What a backend supplies ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Longest row in tokens."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Hidden size of the model, for the cost of a row."""

    @abstractmethod
    def score_rows(
        self, input_ids: Tensor, lengths: Sequence[int], mask: Tensor, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies [B, T] of the masked tokens at the sampling temperature, on the model's device."""

    @abstractmethod
    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch."""

    @abstractmethod
    def optimizer_step(self) -> tuple[float, list[float]]:
        """Apply the gradients; return their norm and the learning rates."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients gathered since the last optimizer step."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the reference policy's weights."""

    # Groups in ------------------------------------------------------------------------------------------------------

    async def recv_batch(
        self, input_channel: Any, groups: int | None = None, step: int | None = None, seconds: float | None = None
    ) -> dict[str, float]:
        """Take admitted groups from the channel until this rank holds `groups` (None: promptsPerStep / ranks); return `rollout/*`.

        The runner admits each group before it counts; its EndOfStep of `step` ends the wait early. Not collective.
        `seconds` bounds it (None: deadlines.rollout). Raises DeadlineExceeded naming how many are missing.
        """
        wanted = self.cfg.algorithm.prompts_per_step // self.ranks.size if groups is None else groups
        limit = self.cfg.runtime.deadlines.rollout if seconds is None else seconds
        intake = GroupIntake(
            input_channel,
            admit=self._admit,
            progress=lambda: self.record_progress("groups"),
            wanted=wanted,
            step=step,
            limit=limit,
        )
        with self.waiting("trajectories", "rollout"):
            records = await intake.receive()
        await asyncio.to_thread(self.load_batch, records)
        return rollout_metrics(records)

    async def _admit(self, records: list[PromptGroupRecord]) -> list[bool]:
        """Return the runner's answers; outside a job nobody refuses."""
        if self.stand_alone:
            return [True] * len(records)
        sampling = self.cfg.algorithm.dynamic_sampling
        min_std = sampling.min_std if sampling.enabled else None
        entries = [group_entry(record, min_std=min_std, rank=self.ranks.rank) for record in records]
        return list(await self.hub_call("admit", entries))

    def load_batch(self, records: Iterable[PromptGroupRecord]) -> None:
        """Hold `records` as the step's groups of this rank; their order does not matter."""
        ordered = sorted(records, key=lambda record: natural_key(record.group_id))
        budget = self.cfg.actor.micro_batch_tokens
        self.prepared = preparation.collate(ordered, max_length=self.max_length, micro_batch_tokens=budget)
        self.cancellation.begin()

    # Log-probabilities and advantages -------------------------------------------------------------------------------

    def compute_log_probs(self, batch: TrainingBatch | None = None) -> Tensor | None:
        """Return the trainer's log-probabilities [B, S] of `batch`, without gradient.

        None: of the held groups, kept there together with the reference's where the loss needs them; nothing is returned. A cancelled
        step is left without them.
        """
        if batch is not None:
            with self.ranks.guard("computing log-probabilities"):
                return self._score(batch)
        prepared = self._require_batch("compute_log_probs")
        try:
            with self.ranks.guard("computing log-probabilities"):
                if self.cfg.algorithm.recompute_log_probs:
                    prepared.old_log_probs = self._score(prepared.collated)
                if self.cfg.algorithm.needs_reference:
                    prepared.ref_log_probs = self.compute_ref_log_probs(prepared.collated)
        except StepCancelled:
            self._leave_step()
        return None

    def compute_ref_log_probs(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's log-probabilities [B, S] of `batch`; trained weights are as before afterwards."""
        with self.ranks.guard("computing reference log-probabilities"), self.reference():
            return self._score(batch)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Compute the held groups' advantages; return this rank's metrics of rewards, groups and advantages."""
        prepared = self._require_batch("compute_advantages_and_returns")
        if prepared.ref_log_probs is None and self.cfg.algorithm.needs_reference:
            self.compute_log_probs()
        with self.ranks.guard("computing advantages"):
            reduce = self.ranks.sum if self.ranks.size > 1 else None
            preparation.finish(prepared, self.cfg.algorithm, max_new_tokens=self.response_limit, reduce=reduce)
        return {name: float(stat) for name, stat in prepared.metrics.items()}

    def _score(self, batch: TrainingBatch) -> Tensor:
        scored = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        lengths = batch.lengths.tolist()
        columns = {"input_ids": batch.input_ids, "loss_mask": batch.loss_mask}
        rows = StepRows(numbers=list(range(len(lengths))), lengths=lengths, columns=columns)
        for part in self._micro_batches(lengths):
            if self.cancellation.agreed():
                raise StepCancelled
            micro = rows.take(part) if part else StepRows.masked_row(rows)
            with torch.no_grad():
                log_probs, _ = self.score_rows(micro.columns["input_ids"], micro.lengths, micro.columns["loss_mask"])
            if part:
                scored[part, : log_probs.shape[1]] = log_probs.cpu()
        return scored

    # Training -------------------------------------------------------------------------------------------------------

    async def cancel_training(self) -> None:
        """Give up the step at the next micro-batch; returns at once, while the training thread computes. Asking one rank will do.

        Weights, optimizer, counters and random state are then those of the step before, and the groups are no longer held. Only the
        first mini-batch of a step can be left: once one has ended the rest is trained too, as some of the groups are in the weights and
        the ledger counts whole steps. The same holds after the last micro-batch, when only the optimizer's work is left.
        """
        self.cancellation.ask()

    def run_training(self, step: int | None = None) -> dict[str, float] | None:
        """Train on the held groups; return the step's `actor/*`, `perf/*` and `time/*` over all ranks, equal on each; None when cancelled.

        Raises RuntimeError without groups or advantages, InfrastructureError when a rank is lost, DataError after too many
        gradients in a row that were not finite.
        """
        prepared = self._require_batch("run_training")
        columns, started = prepared.columns(), time.perf_counter()
        number = self.global_step + 1 if step is None else step
        batch, report = prepared.batch, StepReport(self.counts)
        report.add(prepared.metrics)
        try:
            with self.ranks.guard("training"):
                texts, groups, lengths = batch.group_texts, batch.group_ids.tolist(), batch.lengths.tolist()
                layout, numbers = lay_out(self.ranks, texts, groups, lengths)
                rows = StepRows(numbers=numbers, lengths=lengths, columns=columns)
                for epoch in range(self.cfg.algorithm.update_epochs):
                    if report.early_stopped:
                        break
                    self._train_epoch(rows, layout.lengths, number, epoch, report)
                metrics = report.finish(self.ranks, tokens=sum(layout.lengths), seconds=time.perf_counter() - started)
        except StepCancelled:
            self._leave_step()
            return None
        self.prepared = None
        self.global_step = number
        return metrics

    def _train_epoch(self, rows: StepRows, lengths: list[int], step: int, epoch: int, report: StepReport) -> None:
        algorithm = self.cfg.algorithm
        plan = plan_epoch(
            lengths,
            minibatches=algorithm.optimizer_steps_per_batch,
            ranks=self.ranks.size,
            hidden_size=self.hidden_size,
            balance=self.cfg.actor.balance,
            seed=(algorithm.seed, step, epoch),
        )
        report.imbalance = plan.imbalance
        mine = move_rows(self.ranks, rows, plan.destination)
        place = {number: index for index, number in enumerate(mine.numbers)}
        for parts in plan.minibatches:
            minibatch = mine.take([place[number] for number in parts[self.ranks.rank]])
            self._train_minibatch(minibatch, report)
            if report.exceeds(self.ranks, ratio=algorithm.max_policy_ratio, kl=algorithm.max_policy_kl):
                break

    def _train_minibatch(self, rows: StepRows, report: StepReport) -> None:
        """One optimizer step over `rows` of this rank and their counterparts on the others."""
        mask = rows.columns["loss_mask"]
        normalizers = count_normalizers(mask, reduce=self.ranks.sum if self.ranks.size > 1 else None)
        if normalizers.tokens == 0:
            self.counts.empty += 1
            return
        parts = self._micro_batches(rows.lengths)
        report.add({"perf/padding_waste": _padding_waste(rows.lengths, parts)})
        seen: list[dict[str, Stat]] = []
        with report.timing("forward_backward"):
            for index, part in enumerate(parts):
                if report.nothing_ended and self.cancellation.agreed():
                    self._cancel_minibatch(rows, normalizers, begun=index > 0)
                micro = rows.take(part) if part else StepRows.masked_row(rows)
                with self.before_micro_batch(self.model, index == len(parts) - 1):
                    seen.append(self._forward_backward(micro, normalizers))
                self.record_progress("micro_steps")
        with report.timing("optimizer"):
            norm, rates = self.optimizer_step()
        report.add_step(seen, norm=norm, rate=rates[0])

    def _cancel_minibatch(self, rows: StepRows, normalizers: Any, *, begun: bool) -> NoReturn:
        """Drop the gradients so far and raise StepCancelled."""
        if begun:
            # What a wrapper holds back until the last micro-batch becomes gradients with an empty one.
            with self.before_micro_batch(self.model, True):
                self._forward_backward(StepRows.masked_row(rows), normalizers)
        self.drop_gradients()
        raise StepCancelled

    def _leave_step(self) -> None:
        self.prepared = None
        self.cancellation.restore()
        self.log_info(
            "step %s is given up; weights and counters are those of step %s", self.global_step + 1, self.global_step
        )

    def _forward_backward(self, rows: StepRows, normalizers: Any) -> dict[str, Stat]:
        columns = {name: column.to(self.compute_device) for name, column in rows.columns.items()}
        # Entropies are always told; without a coefficient they have no part in the loss, and no gradient is made of them.
        log_probs, entropy = self.score_rows(
            rows.columns["input_ids"], rows.lengths, rows.columns["loss_mask"], entropy=True
        )
        result = self.objective(log_probs, entropy, columns, normalizers)
        # Ranks' gradients are averaged by the backend; shares of the loss are to be summed.
        (result.loss * self.ranks.size).backward()
        return result.metrics

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the micro-batches of this rank's rows, as many as on the other ranks; each longest row first."""
        agree = self.ranks.largest if self.ranks.size > 1 else None
        parts = plan_microbatches(lengths, token_budget=self.cfg.actor.micro_batch_tokens, agree=agree)
        # Rows of like length side by side make attention's dense batches tight.
        return [sorted(part, key=lambda row: (-lengths[row], row)) for part in parts]

    def _require_batch(self, method: str) -> PreparedBatch:
        if self.prepared is None:
            raise RuntimeError(f"{method} needs the step's groups, got none; call recv_batch or load_batch first")
        return self.prepared


def _padding_waste(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> Stat:
    """Return the share of the tokens run that belong to no row: packed rows have no padding, an empty micro-batch is one token."""
    idle = float(sum(not part for part in parts))
    total = torch.tensor(idle, dtype=torch.float64)
    return Stat("mean", total, total + float(sum(lengths)))
