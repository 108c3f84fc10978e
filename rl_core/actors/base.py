"""The trainer's worker: it receives prompt groups, trains on them and publishes the weights, with any backend.

    recv_batch -> compute_log_probs -> compute_advantages_and_returns -> run_training -> sync_model_to_rollout

An actor is one process of the trainer; the name is that of verl and RLinf. An `Actor` is made of these parts, and its remote methods
delegate to them:

    Actor --- StepEngine       what a step trains: rows, mini-batches, normalizers, metrics
          --- TrainBackend     forward and backward passes
          --- ModelManager     model, optimizer, checkpoints, export; its OffloadManager offloads them
          --- WeightPublisher  sends weights to the rollouts; on rank 0 only
          --- StepProfiler     profiles the steps that the job names

A prompt group is one prompt with its G sampled completions. The runner's ledger lists the groups of a run and which of them are trained in
which step.

Methods are collective over the actor's ranks unless they say otherwise: the runner calls them on all ranks in the same order.
`cancel_training` may be called at any time.

Legend: B rows (completions), S tokens of the padded row.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rl_core.actors.backend import TrainBackend
from rl_core.actors.critic_group import CriticGroup
from rl_core.actors.inference import InferenceGroup
from rl_core.actors.manager import validated
from rl_core.actors.profiling import StepProfiler
from rl_core.actors.publishing import copy_to_devices, open_publisher
from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.step_engine import StepEngine
from rl_core.actors.teachers import Teachers
from rl_core.api.errors import ChannelClosed, ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import TrainingBatch
from rl_core.batching.samples import keep_sample
from rl_core.channel.backend import DEFAULT_KEY
from rl_core.messages.channel import Key
from rl_core.messages.groups import rank_key
from rl_core.messages.samples import KeptSample, StepSamples
from rl_core.messages.weights import LateReport, PublishReport, ReceiverAddress
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.workers.worker import Worker

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher

REWARD = "total_reward/"
"""Prefix of metrics that have no meaning when no sample of the group has a reward."""

ANSWER_SHARE = 0.8
"""Share of the deadlines of a call and of a collective that other groups get for their answers, so that their failure arrives first."""


class Actor(Worker, ABC):
    """One rank of the trainer. It is constructed in every actor process, and `init_worker` must be called first."""

    keeps_samples: ClassVar[bool] = True
    """Whether `take_samples` has anything to return: trajectories of simulators have no texts to keep."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = "actor") -> None:
        """Join the other ranks; no model is built yet.

        `cfg` is the job's spec, or a mapping that is validated into one. `placement` is accepted for compatibility and ignored, because
        `actor.parallel` gives the layout. Raises ConfigError for a role other than actor and for settings that the backend does not
        support.
        """
        if role != "actor":
            raise ConfigError(f"{type(self).__name__} must have role actor, got {role!r}; choose it")
        self.backend = self._build_backend(validated(cfg))
        self.manager = self.backend.manager
        self.cfg, self.ranks = self.manager.cfg, self.manager.ranks
        self.publisher: WeightPublisher | None = None
        self._profiler = StepProfiler(
            self.cfg.actor.profile_steps, rank=self.ranks.rank, device=self.manager.compute_device
        )
        self.engine = StepEngine(
            self.backend,
            self.ranks,
            self.cfg.algorithm,
            micro_batch_tokens=self.cfg.actor.micro_batch_tokens,
            response_limit=self.cfg.rollout.sampling.max_new_tokens * self.cfg.env.max_turns,
            balance=self.cfg.actor.balance,
            kept_groups=self.cfg.samples.groups if self.keeps_samples else 0,
            progress=lambda: self.record_progress("micro_steps"),
            teachers=self._teachers(),
            inference=self._inference(),
            critic=self._critic(),
        )

    def _teachers(self) -> Teachers | None:
        """Return the teachers of the job, None without distillation. Other ranks wait for their answers in a collective."""
        distillation = self.cfg.algorithm.distillation
        return None if distillation is None else Teachers(self, distillation, **self._bounds_of_answers())

    def _inference(self) -> InferenceGroup | None:
        """Return the group that computes the old log-probabilities, None where the trainer does."""
        group = self.cfg.algorithm.inference
        return None if group is None else InferenceGroup(self, group, **self._bounds_of_answers())

    def _critic(self) -> CriticGroup | None:
        """Return the group that holds the critic, None where this worker does or there is none."""
        group = self.cfg.algorithm.critic_group
        return None if group is None else CriticGroup(self, group, seconds=self._answer_seconds)

    def _bounds_of_answers(self) -> dict[str, float]:
        """Return the temperature at which other groups score tokens, and the seconds within which they must answer."""
        return {"temperature": self.cfg.rollout.sampling.temperature, "seconds": self._answer_seconds}

    @property
    def _answer_seconds(self) -> float:
        """Seconds within which other groups must answer."""
        deadlines = self.cfg.runtime.deadlines
        return ANSWER_SHARE * min(deadlines.group_method, deadlines.collective)

    @abstractmethod
    def _build_backend(self, cfg: RLJobSpec) -> TrainBackend:
        """Return the backend of this rank with its model manager. The model is not built yet."""

    def init_worker(self) -> None:
        """Build model and optimizer from `model.path` and open the weight publisher on rank 0.

        Afterwards the parts that `actor.offload` names are offloaded to host memory.
        """
        self.manager.setup_model_and_optimizer()
        self.publisher = open_publisher(self, self.cfg, self.ranks)
        self.occupy(self.cfg.actor.offload.resident)

    # Groups in ------------------------------------------------------------------------------------------------------

    async def recv_batch(
        self, input_channel: Any, groups: int | None = None, step: int | None = None, seconds: float | None = None
    ) -> dict[str, float]:
        """Receive this rank's prompt groups of `step` from the channel and keep them for training. Not collective.

        The runner moves the records of the groups that it admits to the key of this rank.

        - `input_channel`: the channel of trajectories.
        - `groups`: number of groups to receive; None means promptsPerStep / number of data ranks. Fewer are returned when the runner has
          made the step smaller.
        - `step`: the step whose key is read; None reads the channel's default key.
        - `seconds`: timeout; None means deadlines.rollout.

        Returns the metrics `rollout/*` of the groups. Only the first rank of each replica receives groups; the others return {} at once and
        get them by broadcast in the next method. Raises DeadlineExceeded with the number of groups received.
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
        """Set the prompt groups that this rank trains in the next step, in any order. Not collective."""
        self.engine.load(records, version=self.global_step)

    # The step -------------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """The last step that was trained. It is also the version of the weights."""
        return self.manager.global_step

    def set_global_step(self, global_step: int) -> None:
        """Set the last trained step. Raises ValueError when it is negative or smaller than the present one."""
        self.manager.set_global_step(global_step)

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another total number of steps of the run. Not collective.

        Raises ConfigError when the learning rate schedule does not fit them.
        """
        self.manager.set_schedule(learning_rate, steps)

    def compute_log_probs(self, batch: TrainingBatch | None = None) -> Tensor | None:
        """Compute the trainer's log-probabilities without gradient.

        With a `batch`, return them as [B, S] float32. With None, compute what the loss needs for the groups of the step (log-probabilities
        of the trainer and of the reference policy, values of the critic), keep it for the step and return None. If the step is cancelled
        meanwhile, its groups are dropped.
        """
        if batch is not None:
            return self.engine.score(batch)
        with self._profiler.covering(self.global_step + 1):
            self.engine.compute_log_probs()
        if self.engine.prepared is None:
            self._log_cancelled(self.global_step + 1)
        return None

    def compute_ref_log_probs(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's log-probabilities of `batch`, [B, S] float32.

        The trained weights are unchanged afterwards.
        """
        return self.engine.score_reference(batch)

    def compute_advantages_and_returns(self) -> Mapping[str, float | Tensor]:
        """Compute the advantages of the step's groups and, with a critic, the returns.

        Returns this rank's metrics of rewards, groups and advantages. Raises RuntimeError when no groups were received.
        """
        return self.engine.compute_advantages()

    def run_training(self, step: int | None = None) -> dict[str, float] | None:
        """Train on the groups of the step. `step` is its number, and None means the next number.

        If the advantages were not computed yet, they are computed first. Returns the metrics `actor/*`, `perf/*` and `time/*`, reduced over
        all ranks and equal on each, or None if the step was cancelled. Raises the errors of `StepEngine.train`.
        """
        number = self.global_step + 1 if step is None else step
        with self._profiler.covering(number, ends_step=True):
            metrics = self.engine.train(number)
        if metrics is None:
            self._log_cancelled(number)
        else:
            self.manager.set_global_step(number)
            self.manager.renew_reference(number)
        return metrics

    def take_samples(self) -> StepSamples:
        """Return what this rank kept of the last step that was trained (`samples.groups`), and forget it. Not collective."""
        sampler = self.engine.sampler
        return StepSamples(samples=(), log_probs=()) if sampler is None else sampler.take()

    async def read_samples(self, channel: Any, groups: Mapping[str, str]) -> tuple[KeptSample, ...]:
        """Take prompt groups that are not trained off `channel` and return their samples, without the trainer's numbers. Not collective.

        `groups` is the lease token, under which a record is stored, -> group id. Rank 0 reads them; the other ranks return nothing. Raises
        DeadlineExceeded for a record that does not come within deadlines.rpc.
        """
        if self.ranks.rank:
            return ()
        seconds = self.cfg.runtime.deadlines.rpc
        records = {
            group_id: await channel.get(key=token, async_op=True, timeout=seconds).async_wait()
            for token, group_id in groups.items()
        }
        return tuple(
            keep_sample(record, index, group_id=group_id)
            for group_id, record in records.items()
            for index in range(len(record.completions))
        )

    def _log_cancelled(self, step: int) -> None:
        self.log_info("step %s is cancelled: weights, optimizer, counters and random state are those before it", step)

    async def cancel_training(self) -> None:
        """Cancel the step before its next micro-batch. Not collective; returns at once, while the training thread computes.

        A step can only be cancelled during its first mini-batch, before any optimizer step; a later request has no effect (see
        `StepEngine.cancel`). After a cancellation weights, optimizer, counters and random state are those before the step, and its groups
        are dropped.
        """
        self.engine.cancel()

    def score(self, ids: Sequence[int], prompt_length: int) -> list[float] | None:
        """Return the log-probabilities of the tokens ids[prompt_length:] at the sampling temperature, in nats.

        Only the ranks of the first replica that compute them return them (with pipeline parallelism those of the last stage); the others
        return None.
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
        """Send the weights as version `version` to `receivers` and wait for their acknowledgements.

        `version` None means the global step. The version is committed once `min_acks` receivers have it and the others are too slow. Those
        are not waited for (`late_receivers`). Rank 0 publishes and returns the publisher's report. The other ranks send it their parts of the
        tensors and return None.
        """
        version = self.global_step if version is None else version
        with (
            self.manager.residency.loaded(moments=False),
            self.ranks.guard(f"publishing version {version}"),
            # The other ranks queue the sends of all buckets at once, and rank 0 receives a bucket when it has copied the one before.
            self.ranks.collectives_within(self.cfg.runtime.deadlines.weight_sync),
        ):
            needs_base = self.publisher is None or self.publisher.needs_base
            source = self.manager.publish_source(self.cfg.weights.bucket_bytes, needs_base=needs_base)
            try:
                handles = copy_to_devices(self, self.cfg, self.ranks, source, receivers, self.publisher)
                if self.publisher is None:
                    return None
                report = self.publisher.publish(version, source, receivers, min_acks, handles)
                self.set_policy_version(version, report.digest)
                return report
            finally:
                source.finish()

    async def late_receivers(self) -> LateReport | None:
        """Return how the last sync ended for the rollouts that were late in it, once it has; None on ranks other than 0. Not collective."""
        return None if self.publisher is None else await self.publisher.late_receivers()

    def publisher_address(self) -> str | None:
        """Return the address from which rollouts that join later pull the weights, None on ranks other than 0. Not collective."""
        return None if self.publisher is None else self.publisher.address

    async def receiver_lost(self, name: str, reason: str) -> None:
        """Continue a weight sync in progress without the rollout `name`, because the hub declared it lost. Not collective."""
        if self.publisher is not None:
            self.publisher.lost(name, reason)

    # State ----------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_path: str, step: int = 0, in_background: bool = False
    ) -> dict[str, str] | Awaitable[dict[str, str]]:
        """Write this rank's part of a checkpoint; return relative path -> digest. See ModelManager.save_checkpoint."""
        return self.manager.save_checkpoint(save_path, step, in_background)

    def load_checkpoint(self, load_path: str) -> None:
        """Load a checkpoint, which may have been saved by another number of ranks. See ModelManager.load_checkpoint."""
        self.manager.load_checkpoint(load_path)

    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face model folder. `dtype` None means model.dtype. See ModelManager.export_hf."""
        self.manager.export_hf(path, dtype=dtype)

    def occupy(self, parts: Collection[str]) -> dict[str, float]:
        """Keep exactly `parts` ("weights", "gradients", "optimizer") on the device and offload the others. Not collective.

        Returns the bytes and seconds moved. See OffloadManager.occupy.
        """
        return self.manager.residency.occupy(parts)

    def close(self) -> None:
        """Stop serving weights to the rollouts."""
        if self.publisher is not None:
            self.publisher.close()


async def receive_groups(
    channel: Any, *, wanted: int, limit: float, key: Key, progress: Callable[[], None] = lambda: None
) -> list[PromptGroupRecord]:
    """Receive `wanted` records from `channel` under `key`.

    Returns fewer when the key is closed. `limit` is in seconds; `progress()` is called for each record. Raises DeadlineExceeded with the
    number of records that came in time.
    """
    records: list[PromptGroupRecord] = []
    deadline = time.monotonic() + limit
    while len(records) < wanted:
        remaining = max(deadline - time.monotonic(), 0.001)
        try:
            received = await channel.get_some_async(wanted - len(records), key=key, timeout=remaining)
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
    """Return the groups' `rollout_metrics`, aggregated and named `rollout/*`. Values that are not finite numbers are left out."""
    finite = []
    for record in records:
        # An empty histogram means that all samples are masked. The reward metrics are then left out: a missing reward is not a reward of 0.
        unrewarded = record.rollout_metrics.get(f"{REWARD}histogram") == []
        values = record.rollout_metrics.items()
        numbers = {name: float(v) for name, v in values if isinstance(v, int | float) and math.isfinite(v)}
        finite.append({name: v for name, v in numbers.items() if not (unrewarded and name.startswith(REWARD))})
    return {f"rollout/{name}": value for name, value in aggregate_rollout_metrics(finite).items()}
