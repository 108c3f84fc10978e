"""One rank's share of a model in training: optimizer steps, save, load and export. It contains no reinforcement learning.

Each backend derives its own manager from `ModelManager`. Saved, exported and published tensors have their Hugging Face names and
shapes, so that a checkpoint can be loaded into any parallel layout of the same model.
"""

import asyncio
import concurrent.futures
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.actors import checkpoint, export
from rl_core.actors.critic import of_critic
from rl_core.actors.ranks import ParallelSizes, Ranks
from rl_core.actors.reference import ReferencePolicy
from rl_core.actors.residency import Residency, ResidentState
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.slices import LocalSlice, Slices
from rl_core.actors.source import GatheredSource
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.plan.capacity import ModelFacts, admit, estimate

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelManager(ResidentState):
    """One rank's share of a model in training. Methods are collective unless they say otherwise.

    `residency` moves its weights, gradients and moments between device and host.
    """

    optimizer: Any
    """Has `param_groups`, as those of torch have."""

    def __init__(self, cfg: RLJobSpec, sizes: ParallelSizes, rank: int) -> None:
        """Join the ranks.

        Raises ValueError for a rank outside [0, sizes.world), ConfigError for accelerators asked for and not visible.
        """
        self.cfg = cfg
        self.compute_device = compute_device(cfg, rank)
        self.ranks = Ranks(sizes, rank=rank, device=self.compute_device, timeout=cfg.runtime.deadlines.collective)
        self.dtype = DTYPES[cfg.model.dtype]
        self.counts = OptimizerCounts()
        self.consecutive_skips: list[float] = []
        """Norms of the steps skipped in a row."""
        self.global_step = 0
        self.sync_names: list[tuple[str, str | None]] = []
        """Names to sync and export in the model's order: (name, the name it is tied to or None)."""
        self._reference: ReferencePolicy | None = None
        self._background = checkpoint.BackgroundWriter()
        self.residency = Residency(self, self.compute_device)

    # Implemented by each backend's manager --------------------------------------------------------------------------

    @abstractmethod
    def _set_up(self) -> None:
        """Build, fill and wrap the model, list `sync_names`, build the optimizer and its schedule."""

    @property
    @abstractmethod
    def model_config(self) -> Any:
        """Return the configuration that transformers has of the model."""

    @abstractmethod
    def _parameter_tensors(self) -> Sequence[Tensor]:
        """Return what this rank stores of the policy's parameters."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Return the norm of the gradients over all ranks, equal on each."""

    @abstractmethod
    def _apply_gradients(self, norm: float) -> None:
        """Clip the gradients, whose norm is finite, and step the optimizer."""

    @abstractmethod
    def _follow_schedule(self) -> None:
        """Take the learning rate of applied step `counts.applied` from the schedule."""

    @abstractmethod
    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients. Not collective."""

    @abstractmethod
    def named_slices(self) -> dict[str, LocalSlice]:
        """Return what this rank stores of the weights by Hugging Face name, tied ones once. Not collective."""

    @abstractmethod
    def master_slices(self) -> Slices:
        """Return what this rank's optimizer updates of the weights, float32, by Hugging Face name. Not collective."""

    @abstractmethod
    def moment_slices(self) -> Slices:
        """Return what this rank stores of the moments as `<parameter>.<moment>`. Not collective."""

    @abstractmethod
    def _written(self, slices: Slices) -> Slices:
        """Return those of `slices` that this rank writes: each element of a tensor is written by one rank."""

    @abstractmethod
    def _step_counters(self) -> dict[str, float]:
        """Return parameter name -> its number of AdamW steps; collective, whole on rank 0."""

    def _before_state(self, counts: OptimizerCounts) -> None:
        """Have the optimizer that goes with `counts`, of a checkpoint that is about to be loaded."""
        self.counts = counts

    @abstractmethod
    def _resume(self, weights: Slices, moments: Slices, steps: Mapping[str, float]) -> None:
        """Go on from slices that a checkpoint filled, from its AdamW steps by parameter and from `counts`."""

    @abstractmethod
    def version_source(self, dtype: str, bucket_bytes: int) -> GatheredSource:
        """Return the weights as they are, floating ones in `dtype`; every rank calls its `finish`."""

    # Set-up ---------------------------------------------------------------------------------------------------------

    def setup_model_and_optimizer(self) -> None:
        """Build model, optimizer and schedule; keep the starting weights as reference policy where a KL needs one.

        Raises RuntimeError when called twice.
        """
        if self.residency.has_model:
            raise RuntimeError("setup_model_and_optimizer must be called once, got a second call; make a new manager")
        with self.ranks.guard("setting up the model"):
            self._set_up()
        self.residency.has_model = True
        if self.cfg.algorithm.needs_reference:
            self._reference = ReferencePolicy(self._parameter_tensors())

    @property
    def max_length(self) -> int:
        """Longest row in tokens: the configured limit, else the model's."""
        return int(self.cfg.rollout.max_sequence_length or self.model_config.max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the model."""
        return int(self.model_config.hidden_size)

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its starting weights. Raises RuntimeError where the loss has no KL term."""
        if self._reference is None:
            raise RuntimeError(
                "the reference policy is kept only with algorithm.loss.klCoefficient or rewardKlCoefficient above 0, got 0; set one"
            )
        self.residency.require_loaded("the reference policy")
        self.wait_for_readers()
        return self._reference.swapped()

    # Steps ----------------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Clip and apply the gradients; return the norm before clipping and each group's learning rate in this step.

        A norm that is not finite on any rank changes nothing on all: gradients are zeroed and the skip is counted.
        With `actor.offload.optimizer` the moments come for the step alone. Raises DataError after more than `actor.maxConsecutiveSkips`
        skips in a row, RuntimeError while weights or moments are offloaded.
        """
        if not self.cfg.actor.offload.optimizer:
            return self._optimizer_step()
        self.residency.load_optimizer()
        try:
            return self._optimizer_step()
        finally:
            self.residency.offload_optimizer()

    def _optimizer_step(self) -> tuple[float, list[float]]:
        self.residency.require_loaded("optimizer_step", moments=True)
        rates = self._learning_rates()
        norm = self._gradient_norm()
        self.counts.attempted += 1
        if math.isfinite(norm):
            self.wait_for_readers()
            self._apply_gradients(norm)
            self.counts.applied += 1
            self._follow_schedule()
            self.consecutive_skips = []
        self.drop_gradients()
        if not math.isfinite(norm):
            self._count_skip(norm)
        return norm, rates

    def _learning_rates(self) -> list[float]:
        """Return each group's learning rate in the next optimizer step, the policy's first."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _count_skip(self, norm: float) -> None:
        self.counts.skipped += 1
        self.consecutive_skips.append(norm)
        limit = self.cfg.actor.max_consecutive_skips
        logger.warning("gradient norm %s: optimizer step skipped (%s in a row)", norm, len(self.consecutive_skips))
        if len(self.consecutive_skips) > limit:
            raise DataError(
                f"actor.maxConsecutiveSkips allows {limit} optimizer steps in a row without a finite gradient, got "
                f"{len(self.consecutive_skips)} with norms {self.consecutive_skips}; lower the learning rate or look at the data"
            )

    @property
    def has_critic(self) -> bool:
        """Return whether a critic learns with the policy."""
        return self.cfg.algorithm.critic_in_use is not None

    @property
    def _warming_up(self) -> bool:
        """Return whether the critic alone trains in the next optimizer step."""
        return self.counts.applied < self.cfg.actor.critic_warmup_steps

    @property
    def _applied_in_phase(self) -> int:
        """Return the optimizer steps applied in the critic's warm-up, or since it ended: schedule and moments begin afresh then."""
        return self.counts.applied - (0 if self._warming_up else self.cfg.actor.critic_warmup_steps)

    def _scheduled_steps(self, steps: int | None = None) -> int:
        """Return the optimizer steps of a run of `steps` (None: algorithm.steps) in which the policy trains."""
        algorithm = self.cfg.algorithm
        steps = algorithm.steps if steps is None else steps
        total = steps * algorithm.update_epochs * algorithm.optimizer_steps_per_batch
        return total - self.cfg.actor.critic_warmup_steps

    def set_global_step(self, global_step: int) -> None:
        """Set the step (the weights' version). Raises ValueError when it is negative or goes back."""
        if global_step < max(self.global_step, 0):
            raise ValueError(f"global_step must be {self.global_step} or more, got {global_step}; steps only rise")
        self.global_step = global_step

    # Offloading -----------------------------------------------------------------------------------------------------

    def offload_param_and_grad(self, offload_grad: bool = False) -> None:
        """Move the weights to the host; with `offload_grad` also drop the gradients. Not collective.

        Raises RuntimeError when gradients that no optimizer step has applied would be dropped.
        """
        if offload_grad:
            self.residency.offload_gradients()
        self.residency.offload_weights()

    def load_param_and_grad(self, device_id: int, load_grad: bool = False) -> None:
        """Move the weights back, bit-equal in the same tensor objects; with `load_grad` also allocate zero gradients. Not collective.

        `device_id` is the rank's accelerator; it is ignored on a CPU. Raises ValueError when there is no such accelerator.
        """
        self._check_device(device_id)
        self.residency.load_weights()
        if load_grad:
            self.residency.load_gradients()

    def offload_optimizer(self) -> None:
        """Move the moments to the host. Not collective."""
        self.residency.offload_optimizer()

    def load_optimizer(self, device_id: int) -> None:
        """Move the moments back, bit-equal; `device_id` as in `load_param_and_grad`. Not collective."""
        self._check_device(device_id)
        self.residency.load_optimizer()

    def _check_device(self, device_id: int) -> None:
        if self.compute_device.type == "cuda" and not 0 <= device_id < torch.cuda.device_count():
            raise ValueError(
                f"device_id must be in [0, {torch.cuda.device_count()}), got {device_id}; use the rank's accelerator"
            )

    # State ----------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_path: str, step: int = 0, in_background: bool = False
    ) -> dict[str, str] | Awaitable[dict[str, str]]:
        """Write and sync this rank's shards of model and optimizer, its random state and, on rank 0, the counters.

        Returns path below `save_path` -> digest. `in_background`: return an awaitable of that at once, and copy them and write the copy from
        a thread; the next optimizer step waits for the copy, the next save for all. Raises InfrastructureError when the storage refuses.
        """
        with self.residency.loaded(), self.ranks.guard("saving a checkpoint"):
            part = checkpoint.RankPart.of(
                self.ranks,
                self._counters(step),
                model=self._written(self.master_slices()),
                optimizer=self._written(self.moment_slices()),
            )
            if not in_background:
                return part.write(Path(save_path))
            written = self._background.write(part, Path(save_path))
        return _awaited(written)

    def wait_for_readers(self) -> None:
        """Wait until a background save has copied weights and moments. Not collective."""
        self._background.release()

    def _counters(self, step: int) -> checkpoint.Counters:
        return checkpoint.Counters(
            step=step,
            global_step=self.global_step,
            world_size=self.ranks.size,
            counts=self.counts,
            consecutive_skips=self.consecutive_skips,
            optimizer_steps=self._step_counters(),
        )

    def load_checkpoint(self, load_path: str) -> None:
        """Load what `save_checkpoint` wrote, on any number of ranks.

        Raises FileNotFoundError when there is no checkpoint, DataError for a damaged one or one of another model.
        """
        with self.residency.loaded(), self.ranks.guard("loading a checkpoint"):
            self.wait_for_readers()
            self._before_state(checkpoint.Counters.read(Path(load_path)).counts)
            weights, moments = self.master_slices(), self.moment_slices()
            counters = checkpoint.load(
                Path(load_path), self.ranks, model=weights, optimizer=moments, seed=self.cfg.algorithm.seed
            )
            self.global_step = counters.global_step
            self.consecutive_skips = counters.consecutive_skips
            self._resume(weights, moments, counters.optimizer_steps)

    def get_model_state_dict(self, cpu_offload: bool, full_state_dict: bool) -> dict[str, Tensor]:
        """Return the policy's weights by Hugging Face name.

        full: rank 0 gets whole tensors, the others {}. Not full: what this rank stores. `cpu_offload` copies to the CPU.
        Raises RuntimeError while the weights are offloaded.
        """
        self.residency.require_loaded("get_model_state_dict")
        if not full_state_dict:
            held = {name: part.tensor for name, part in self.named_slices().items() if not of_critic(name)}
        else:
            with self.ranks.guard("gathering the weights"):
                held = self._whole_tensors()
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in held.items()}

    @property
    def _weight_dtype(self) -> str:
        """Return the type in which the backend holds floating weights."""
        return self.cfg.model.dtype

    def _whole_tensors(self) -> dict[str, Tensor]:
        """Return whole tensors on rank 0, tied names as the same tensor; {} on the others."""
        source = self.version_source(self._weight_dtype, 1)
        whole: dict[str, Tensor] = {}
        if self.ranks.rank == 0:
            for bucket in source.buckets(str(self.compute_device)):
                for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                    whole[source.entries[index].name] = tensor
            whole |= {entry.name: whole[entry.alias_of] for entry in source.entries if entry.alias_of is not None}
        source.finish()
        return whole

    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder in `dtype` (None: model.dtype); unchanged weights come out bit-equal.

        Raises InfrastructureError on every rank when rank 0's storage refuses.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one")
        with self.residency.loaded(moments=False), self.ranks.guard("exporting the model"):
            # One tensor at a time: rank 0 never holds the whole model.
            source = self.version_source(dtype or self.cfg.model.dtype, 1)
            refusal: InfrastructureError | None = None
            if self.ranks.rank == 0:
                try:
                    self._export(path, source)
                except InfrastructureError as error:
                    refusal = error
            # All ranks gather every tensor; leaving early would leave the others waiting.
            source.finish()
            refused = self.ranks.largest(int(refusal is not None))
        if refused:
            raise refusal or InfrastructureError(f"actor rank 0 could not export the model to {path}; see its log")

    def _export(self, path: str, source: GatheredSource) -> None:
        plans = [
            export.TensorPlan(name=entry.name, shape=entry.shape, dtype=getattr(torch, entry.dtype))
            for entry in source.entries
            if entry.alias_of is None
        ]
        tensors = (
            (source.entries[index].name, tensor)
            for bucket in source.buckets("cpu")
            for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True)
        )
        export.export_folder(path, source=self.cfg.model.path, plans=plans, tensors=tensors)


async def _awaited(future: "concurrent.futures.Future[dict[str, str]]") -> dict[str, str]:
    return await asyncio.wrap_future(future)


def validated(cfg: RLJobSpec | Mapping[str, Any]) -> RLJobSpec:
    """Return a job's spec, validated where it is a mapping."""
    return cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))


def compute_device(cfg: RLJobSpec, rank: int) -> torch.device:
    """Return the device a rank trains on.

    Raises ConfigError when accelerators are asked for and none is visible, CapacityError for one with too little memory.
    """
    if not cfg.actor.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"actor.gpus asks for {cfg.actor.gpus} accelerators, got none visible; run on such a machine or set it to 0"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    check_memory(cfg, int(torch.cuda.get_device_properties(device).total_memory))
    return device


def check_memory(cfg: RLJobSpec, available: int) -> None:
    """Raise CapacityError where a process of the trainer needs more than a device has, `available` bytes; before it holds anything."""
    admit(estimate(cfg, ModelFacts.from_config(cfg.model.path), device_memory=available), "actor")
