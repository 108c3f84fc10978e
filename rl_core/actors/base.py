"""The trainer's worker: it receives groups, trains on them and publishes the weights, with any backend.

    recv_batch -> compute_log_probs -> compute_advantages_and_returns -> run_training -> sync_model_to_rollout

An `Actor` is made of parts, and its remote methods delegate to them:

    Actor --- StepEngine       what a step trains: rows, mini-batches, normalizers, metrics
          --- TrainBackend     forward and backward passes
          --- ModelManager     model, optimizer, checkpoints, export; its Residency offloads them
          --- WeightPublisher  sends weights to the rollouts; on rank 0 only

Methods are collective over the actor's ranks unless they say otherwise: the runner calls them on all ranks in the same order.
`cancel_training` may be called at any time.

Legend: B rows, S tokens of the padded row.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_core.actors.backend import TrainBackend
from rl_core.actors.manager import validated
from rl_core.actors.publishing import open_publisher
from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.step_engine import StepEngine
from rl_core.api.errors import ChannelClosed, ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.channel.backend import DEFAULT_KEY
from rl_core.messages.channel import Key
from rl_core.messages.groups import rank_key
from rl_core.messages.samples import StepSamples
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.workers.worker import Worker

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher

REWARD = "total_reward/"
"""Prefix of a group's metrics that mean nothing without a reward."""


class Actor(Worker, ABC):
    """One rank of the trainer. It is constructed on every actor process; `init_worker` must be called first."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = "actor") -> None:
        """`cfg`: the job's spec, or a mapping that is validated into one. `placement` is ignored: `actor.parallel` gives the layout.

        Raises ConfigError for a role other than actor and for settings that the backend does not support.
        """
        if role != "actor":
            raise ConfigError(f"{type(self).__name__} must have role actor, got {role!r}; choose it")
        self.backend = self._build_backend(validated(cfg))
        self.manager = self.backend.manager
        self.cfg, self.ranks = self.manager.cfg, self.manager.ranks
        self.publisher: WeightPublisher | None = None
        self.engine = StepEngine(
            self.backend,
            self.ranks,
            self.cfg.algorithm,
            micro_batch_tokens=self.cfg.actor.micro_batch_tokens,
            response_limit=self.cfg.rollout.sampling.max_new_tokens * self.cfg.env.max_turns,
            balance=self.cfg.actor.balance,
            kept_groups=self.cfg.samples.groups,
            progress=lambda: self.record_progress("micro_steps"),
        )

    @abstractmethod
    def _build_backend(self, cfg: RLJobSpec) -> TrainBackend:
        """Return the backend of this rank with its model manager. The model is not built yet."""

    def init_worker(self) -> None:
        """Build model and optimizer from `model.path`, open the publisher on rank 0, offload what `actor.offload` names."""
        self.manager.setup_model_and_optimizer()
        self.publisher = open_publisher(self, self.cfg, self.ranks)
        self.occupy(self.cfg.actor.offload.resident)

    # Groups in ------------------------------------------------------------------------------------------------------

    async def recv_batch(
        self, input_channel: Any, groups: int | None = None, step: int | None = None, seconds: float | None = None
    ) -> dict[str, float]:
        """Take this rank's records of `step` from the channel and hold them as its groups; return `rollout/*`.

        The runner moves the records of admitted groups to this rank's key and closes the key of a step that it cuts. `step` None: the
        records are those under the channel's default key. `groups`: records to take, None = promptsPerStep / data ranks. `seconds`
        bounds the wait, None = deadlines.rollout; DeadlineExceeded says how many are missing. Not collective; a rank that receives
        nothing, because another of its replica does, returns at once.
        """
        if not self.ranks.receives:
            return {}
        with self.waiting("trajectories", "rollout"):
            records = await receive_groups(
                input_channel,
                wanted=self.cfg.algorithm.prompts_per_step // self.ranks.data_size if groups is None else groups,
                limit=self.cfg.runtime.deadlines.rollout if seconds is None else seconds,
                key=DEFAULT_KEY if step is None else rank_key(step, self.ranks.data_rank),
                progress=lambda: self.record_progress("groups"),
            )
        await asyncio.to_thread(self.load_batch, records)
        return rollout_metrics(records)

    def load_batch(self, records: Iterable[PromptGroupRecord]) -> None:
        """Set the groups that this rank trains in the next step; their order does not matter. Not collective."""
        self.engine.load(records, version=self.global_step)

    # The step -------------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The last step that was trained, which is also the version of the weights."""
        return self.manager.global_step

    def set_global_step(self, global_step: int) -> None:
        """Set the step. Raises ValueError when it is negative or smaller than before."""
        self.manager.set_global_step(global_step)

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another number of steps of the run. Not collective.

        Raises ConfigError when the learning rate schedule does not fit them.
        """
        self.manager.set_schedule(learning_rate, steps)

    def compute_log_probs(self, batch: TrainingBatch | None = None) -> Tensor | None:
        """Return the trainer's log-probabilities of `batch`, [B, S] float32, without gradient.

        With None, compute them for the step's groups, together with the reference policy's and the critic's values where the loss needs
        them; they are kept for the step and None is returned. A step that is cancelled meanwhile loses its groups.
        """
        if batch is not None:
            return self.engine.score(batch)
        self.engine.compute_log_probs()
        if self.engine.prepared is None:
            self._log_cancelled(self.global_step + 1)
        return None

    def compute_ref_log_probs(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's log-probabilities of `batch`, [B, S] float32. The trained weights do not change."""
        return self.engine.score_reference(batch)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Compute the advantages of the step's groups; return this rank's metrics of rewards, groups and advantages."""
        return self.engine.compute_advantages()

    def run_training(self, step: int | None = None) -> dict[str, float] | None:
        """Train on the step's groups as `step` (None: the next one); return its metrics, or None when it was cancelled.

        The metrics `actor/*`, `perf/*` and `time/*` are reduced over all ranks and equal on each. Raises as `StepEngine.train`.
        """
        number = self.global_step + 1 if step is None else step
        metrics = self.engine.train(number)
        if metrics is None:
            self._log_cancelled(number)
        else:
            self.manager.global_step = number
        return metrics

    def take_samples(self) -> StepSamples:
        """Return what this rank kept of the last step that was trained (`samples.groups`), and forget it. Not collective."""
        sampler = self.engine.sampler
        return StepSamples(samples=(), log_probs=()) if sampler is None else sampler.take()

    def _log_cancelled(self, step: int) -> None:
        self.log_info("step %s is cancelled: weights, optimizer, counters and random state are those before it", step)

    async def cancel_training(self) -> None:
        """Cancel the step before its next micro-batch. Not collective; returns at once, while the training thread computes.

        Weights, optimizer, counters and random state are then those before the step, and its groups are dropped.
        """
        self.engine.cancel()

    def score(self, ids: Sequence[int], prompt_length: int) -> list[float] | None:
        """Return the log-probabilities of the tokens ids[prompt_length:] at the sampling temperature.

        Only the ranks of the first replica that have them (under pipeline parallelism its last stage) return them, the others None.
        """
        input_ids = torch.tensor([list(ids)], dtype=torch.int64)
        columns = Columns(input_ids=input_ids, loss_mask=torch.arange(len(ids))[None] >= prompt_length)
        row = StepRows(numbers=[0], lengths=[len(ids)], columns=columns)
        with self.manager.residency.loaded(moments=False), self.ranks.guard("scoring a sequence"):
            scored = self.backend.score_rows([row], proceed=lambda: None)
        if not scored or scored[0].log_probs is None or self.ranks.data_rank:
            return None
        log_probs: list[float] = scored[0].log_probs[0, prompt_length:].tolist()
        return log_probs

    # Weights out ----------------------------------------------------------------------------------------------------

    def sync_model_to_rollout(
        self, version: int | None = None, receivers: Sequence[ReceiverAddress] = (), min_acks: int = 0
    ) -> PublishReport | None:
        """Send the weights as `version` (None: the global step) to `receivers` and wait for their acknowledgements.

        Rank 0 publishes and returns the publisher's report. The other ranks send it their parts of the tensors and return None.
        """
        version = self.global_step if version is None else version
        with self.manager.residency.loaded(moments=False), self.ranks.guard(f"publishing version {version}"):
            source = self.manager.version_source(self.cfg.model.dtype, self.cfg.weights.bucket_bytes)
            try:
                if self.publisher is None:
                    return None
                report = self.publisher.publish(version, source, receivers, min_acks)
                self.set_policy_version(version, report.digest)
                return report
            finally:
                source.finish()

    def publisher_address(self) -> str | None:
        """Return the address from which late joiners pull weights; None on ranks other than 0. Not collective."""
        return None if self.publisher is None else self.publisher.address

    async def receiver_lost(self, name: str, reason: str) -> None:
        """Let a sync under way continue without the rollout `name`, which the hub declared dead. Not collective."""
        if self.publisher is not None:
            self.publisher.lost(name, reason)

    # State ----------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_path: str, step: int = 0, in_background: bool = False
    ) -> dict[str, str] | Awaitable[dict[str, str]]:
        """Write this rank's part of a checkpoint; return path -> digest. See ModelManager.save_checkpoint."""
        return self.manager.save_checkpoint(save_path, step, in_background)

    def load_checkpoint(self, load_path: str) -> None:
        """Load a checkpoint that any number of ranks saved. See ModelManager.load_checkpoint."""
        self.manager.load_checkpoint(load_path)

    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder. See ModelManager.export_hf."""
        self.manager.export_hf(path, dtype=dtype)

    def occupy(self, parts: Collection[str]) -> dict[str, float]:
        """Keep exactly `parts` ("weights", "gradients", "optimizer") on the device. See Residency.occupy. Not collective."""
        return self.manager.residency.occupy(parts)

    def close(self) -> None:
        """Stop serving weights."""
        if self.publisher is not None:
            self.publisher.close()


async def receive_groups(
    channel: Any, *, wanted: int, limit: float, key: Key, progress: Callable[[], None] = lambda: None
) -> list[PromptGroupRecord]:
    """Return `wanted` records of `channel` under `key`, or fewer when the key is closed; `progress` is called for each.

    Raises DeadlineExceeded, with the number of records that came, after `limit` seconds.
    """
    records: list[PromptGroupRecord] = []
    deadline = time.monotonic() + limit
    while len(records) < wanted:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            received = await channel.get_some_async(wanted - len(records), key=key, timeout=left)
        except ChannelClosed:
            break
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"recv_batch must get {wanted} groups within deadlines.rollout {limit} s, got {len(records)}; "
                f"the rollouts are slow or gone: {error}"
            ) from error
        records += received
        for _ in received:
            progress()
    return records


def rollout_metrics(records: Sequence[PromptGroupRecord]) -> dict[str, float]:
    """Return the finite numbers of the groups' `rollout_metrics`, aggregated, as `rollout/*`."""
    finite = []
    for record in records:
        # An empty histogram: all samples are masked. No reward is not a reward of 0.
        unrewarded = record.rollout_metrics.get(f"{REWARD}histogram") == []
        values = record.rollout_metrics.items()
        numbers = {name: float(v) for name, v in values if isinstance(v, int | float) and math.isfinite(v)}
        finite.append({name: v for name, v in numbers.items() if not (unrewarded and name.startswith(REWARD))})
    return {f"rollout/{name}": value for name, value in aggregate_rollout_metrics(finite).items()}
