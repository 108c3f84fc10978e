"""An actor's verbs: a worker that receives groups and has a step engine train them, whatever the backend (trainers.md 6).

    recv_batch -> compute_log_probs -> compute_advantages_and_returns -> run_training -> sync_model_to_rollout

All methods are collective over the actor's ranks, unless they say otherwise; the runner calls them on all of them in the same order.
`cancel_training` alone may come at any time: the step is then left between two micro-batches, as if it had never begun.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.backend import TrainBackend
from rl_core.actors.intake import GroupIntake, group_entry, rollout_metrics
from rl_core.actors.ranks import Ranks
from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.schedule import LRSchedule, OptimizerCounts
from rl_core.actors.step_engine import StepEngine
from rl_core.api.job import RLJobSpec
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.weights.offload import Offloader
from rl_core.workers.worker import Worker

__all__ = ["Actor", "LRSchedule", "Offloader", "OptimizerCounts"]


class Actor(Worker, ABC):
    """A rank that trains on whole prompt groups."""

    cfg: RLJobSpec
    ranks: Ranks
    global_step: int
    """Step of the last training; the weights' version."""

    def __init__(self, backend: TrainBackend) -> None:
        """`backend`: what trains the model of this rank; the class that derives from this one brings its state verbs."""
        self._backend = backend
        self.engine = StepEngine(
            backend,
            self.ranks,
            self.cfg.algorithm,
            micro_batch_tokens=self.cfg.actor.micro_batch_tokens,
            response_limit=self.cfg.rollout.sampling.max_new_tokens * self.cfg.env.max_turns,
            balance=self.cfg.actor.balance,
            progress=lambda: self.record_progress("micro_steps"),
        )

    # What the backend's actor answers -------------------------------------------------------------------------------

    @abstractmethod
    def init_worker(self) -> None:
        """Build model and optimizer."""

    @abstractmethod
    def set_global_step(self, global_step: int) -> None:
        """Set the step. Raises ValueError when it is negative or goes back."""

    @abstractmethod
    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Go on with another peak learning rate and another number of steps of the run."""

    @abstractmethod
    def sync_model_to_rollout(self, version: int | None = None, receivers: Any = (), min_acks: int = 0) -> Any:
        """Send the weights as `version` to `receivers`."""

    @abstractmethod
    def save_checkpoint(self, save_path: str, step: int = 0, in_background: bool = False) -> Any:
        """Write this rank's part of a checkpoint; return path -> digest, `in_background` at once an awaitable of that."""

    @abstractmethod
    def load_checkpoint(self, load_path: str) -> None:
        """Load a checkpoint, of any number of ranks."""

    @abstractmethod
    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder."""

    @abstractmethod
    def loaded(self, *, moments: bool = True) -> AbstractContextManager[None]:
        """Have weights, and with `moments` the optimizer's too, present inside the block, and afterwards where they were."""

    # Groups in ------------------------------------------------------------------------------------------------------

    async def recv_batch(
        self, input_channel: Any, groups: int | None = None, step: int | None = None, seconds: float | None = None
    ) -> dict[str, float]:
        """Take admitted groups from the channel until this rank holds `groups` (None: promptsPerStep / data ranks); return `rollout/*`.

        The runner admits each group before it counts; its EndOfStep of `step` ends the wait early. Not collective; a rank that
        receives nothing, because another of its replica does, returns at once.
        `seconds` bounds it (None: deadlines.rollout). Raises DeadlineExceeded naming how many are missing.
        """
        if not self.ranks.receives:
            return {}
        intake = GroupIntake(
            input_channel,
            admit=self._admit,
            progress=lambda: self.record_progress("groups"),
            wanted=self.cfg.algorithm.prompts_per_step // self.ranks.data_size if groups is None else groups,
            step=step,
            limit=self.cfg.runtime.deadlines.rollout if seconds is None else seconds,
        )
        with self.waiting("trajectories", "rollout"):
            records = await intake.receive()
        await asyncio.to_thread(self.load_batch, records)
        return rollout_metrics(records)

    async def _admit(self, records: list[PromptGroupRecord]) -> list[bool | None]:
        """Return the runner's answers; outside a job nobody refuses."""
        if self.stand_alone:
            return [True] * len(records)
        sampling = self.cfg.algorithm.dynamic_sampling
        min_std = sampling.min_std if sampling.enabled else None
        entries = [group_entry(record, min_std=min_std, rank=self.ranks.data_rank) for record in records]
        return list(await self.hub_call("admit", entries))

    def load_batch(self, records: Iterable[PromptGroupRecord]) -> None:
        """Hold `records` as the step's groups of this rank; their order does not matter. Not collective."""
        self.engine.load(records, version=self.global_step)

    # The step -------------------------------------------------------------------------------------------------------

    def compute_log_probs(self, batch: TrainingBatch | None = None) -> Tensor | None:
        """Return the trainer's log-probabilities [B, S] of `batch`, without gradient.

        None: of the held groups, kept there together with the reference's where the loss needs them; nothing is returned. A cancelled
        step is left without them.
        """
        if batch is not None:
            return self.engine.score(batch)
        self.engine.compute_log_probs()
        if self.engine.prepared is None:
            self._log_left(self.global_step + 1)
        return None

    def compute_ref_log_probs(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's log-probabilities [B, S] of `batch`; trained weights are as before afterwards."""
        return self.engine.score_reference(batch)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Compute the held groups' advantages; return this rank's metrics of rewards, groups and advantages."""
        return self.engine.compute_advantages()

    def run_training(self, step: int | None = None) -> dict[str, float] | None:
        """Train on the held groups as `step` (None: the next); return its `actor/*`, `perf/*` and `time/*`; None when cancelled.

        The metrics are over all ranks, equal on each. Raises as `StepEngine.train`.
        """
        number = self.global_step + 1 if step is None else step
        metrics = self.engine.train(number)
        if metrics is None:
            self._log_left(number)
        else:
            self.global_step = number
        return metrics

    def _log_left(self, step: int) -> None:
        self.log_info("step %s is given up: weights, optimizer, counters and random state are those before it", step)

    async def cancel_training(self) -> None:
        """Give up the step at the next micro-batch; returns at once, while the training thread computes. Not collective.

        Weights, optimizer, counters and random state are then those of the step before, and the groups are no longer held.
        """
        self.engine.cancel()

    def score(self, ids: Sequence[int], prompt_length: int) -> list[float] | None:
        """Return the log-probabilities of ids[prompt_length:] at the sampling temperature, on the first data rank's ranks that have them.

        The others return None.
        """
        input_ids = torch.tensor([list(ids)], dtype=torch.int64)
        columns = Columns(input_ids=input_ids, loss_mask=torch.arange(len(ids))[None] >= prompt_length)
        row = StepRows(numbers=[0], lengths=[len(ids)], columns=columns)
        with self.loaded(moments=False), self.ranks.guard("scoring a sequence"):
            scored = self._backend.score_rows([row], proceed=lambda: None)
        if not scored or scored[0].log_probs is None or self.ranks.data_rank:
            return None
        found: list[float] = scored[0].log_probs[0, prompt_length:].tolist()
        return found
