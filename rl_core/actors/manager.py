"""One rank's part of a model in training: optimizer steps, save, load and export. It contains no reinforcement learning.

Each backend derives its own manager from `ModelManager`. Saved, exported and published tensors have their Hugging Face names and shapes, so
that a checkpoint can be loaded into any parallel layout of the same model.
"""

import asyncio
import concurrent.futures
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors import checkpoint, export, hf
from rl_core.actors.critic import HEAD, is_critic_name
from rl_core.actors.device import compute_device
from rl_core.actors.lora import DisabledAdapters, check_same_adapters, identity
from rl_core.actors.published import PublishedState
from rl_core.actors.ranks import ParallelSizes, Ranks
from rl_core.actors.reference import ReferencePolicy
from rl_core.actors.residency import OffloadManager, ResidentState
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.slices import Slices
from rl_core.actors.source import GatheredSource, GatheringPlan
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.weights.manifest import is_adapter_name

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelManager(ResidentState, PublishedState):
    """One rank's part of a model in training. Methods are collective unless they say otherwise.

    `residency` moves its weights, gradients and optimizer moments between device and host.
    """

    optimizer: Any
    """The optimizer. It has `param_groups` as optimizers of torch have."""

    def __init__(self, cfg: RLJobSpec, sizes: ParallelSizes, rank: int) -> None:
        """Join the other ranks; the model is built by `setup_model_and_optimizer`.

        `sizes` is the parallel layout and `rank` this rank in it. Raises ValueError for a rank outside [0, sizes.world), ConfigError when
        accelerators are requested and none is visible, and CapacityError when the model does not fit.
        """
        self.cfg = cfg
        self.compute_device = compute_device(cfg, rank)
        self.ranks = Ranks(sizes, rank=rank, device=self.compute_device, timeout=cfg.runtime.deadlines.collective)
        self.dtype = DTYPES[cfg.model.dtype]
        self.counts = OptimizerCounts()
        self.consecutive_skips: list[float] = []
        """Norms of the steps skipped in a row."""
        self.global_step = 0
        self._reference: ReferencePolicy | DisabledAdapters | None = None
        self._background = checkpoint.BackgroundWriter()
        self.residency = OffloadManager(self, self.compute_device)

    # Implemented by each backend's manager --------------------------------------------------------------------------

    @abstractmethod
    def _set_up(self) -> None:
        """Build the model, load and wrap it, list `sync_names`, and build the optimizer and its schedule."""

    @property
    @abstractmethod
    def model_config(self) -> Any:
        """The transformers configuration of the model."""

    @abstractmethod
    def _layers_with_adapters(self) -> nn.Module:
        """Return a module that contains all layers with adapters of this rank."""

    @abstractmethod
    def _parameter_tensors(self) -> Sequence[Tensor]:
        """Return the parts of the policy's parameters that this rank stores."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Return the norm of the gradients over all ranks. It is equal on each."""

    @abstractmethod
    def _apply_gradients(self, norm: float) -> None:
        """Clip the gradients, whose norm `norm` is finite, and run the optimizer step."""

    @abstractmethod
    def _follow_schedule(self) -> None:
        """Set the learning rate for applied step number `counts.applied`."""

    @abstractmethod
    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Discard the gradients. Not collective."""

    @abstractmethod
    def named_slices(self) -> Slices:
        """Return the parts of the weights that this rank stores, by Hugging Face name; tied weights once. Not collective."""

    def _published_slices(self) -> Slices:
        return self.named_slices()

    def _written_adapters(self) -> Slices:
        return self._written(self.master_slices())

    @abstractmethod
    def master_slices(self) -> Slices:
        """Return the float32 weights that this rank's optimizer updates, by Hugging Face name. Not collective."""

    @abstractmethod
    def moment_slices(self) -> Slices:
        """Return the parts of the optimizer's moments that this rank stores, by `<parameter>.<moment>`. Not collective."""

    @abstractmethod
    def _written(self, slices: Slices, *, updated: bool = True) -> Slices:
        """Return those of `slices` that this rank writes to a checkpoint. Each element of a tensor is written by exactly one rank.

        `updated`: the slices are of what the optimizer updates on this rank, otherwise of what the model computes with.
        """

    @abstractmethod
    def _step_counters(self) -> dict[str, float]:
        """Return the number of AdamW steps of each parameter by name. Collective; complete on rank 0 only."""

    def _before_state(self, counts: OptimizerCounts) -> None:
        """Prepare the optimizer for a checkpoint with these `counts`, which is about to be loaded."""
        self.counts = counts

    @abstractmethod
    def _resume(self, weights: Slices, moments: Slices, steps: Mapping[str, float]) -> None:
        """Continue from a loaded checkpoint.

        `weights` and `moments` hold its values, `steps` the number of AdamW steps of each parameter; `counts` is set already.
        """

    # Set-up ---------------------------------------------------------------------------------------------------------

    def setup_model_and_optimizer(self) -> None:
        """Build model, optimizer and schedule.

        Where the loss or the reward has a KL term, the initial weights are kept as the reference policy, with `model.lora` by freezing
        them. Raises RuntimeError when called twice.
        """
        if self.residency.has_model:
            raise RuntimeError("setup_model_and_optimizer must be called once, got a second call; make a new manager")
        limit = self.cfg.runtime.deadlines.wait_ready
        with self.ranks.collectives_within(limit), self.ranks.guard("setting up the model"):
            self._set_up()
            self.gathering = GatheringPlan(self._published_slices(), self.ranks)
        self.residency.has_model = True
        if self.cfg.algorithm.needs_reference:
            self._reference = self._make_reference()

    def _make_reference(self) -> ReferencePolicy | DisabledAdapters:
        """Return the reference policy: the model without adapters, or else the present weights, kept in host memory."""
        if self.cfg.model.lora is not None:
            return DisabledAdapters(self._layers_with_adapters())
        # While it is swapped in, the trained weights take the place of the gradients.
        return ReferencePolicy(self._parameter_tensors(), self.dtype, make_room=self.residency.without_gradients)

    def _is_trained(self, name: str) -> bool:
        """Return whether the parameter called `name` is trained: with adapters only these and the value head, otherwise every parameter."""
        return self.cfg.model.lora is None or is_adapter_name(name) or HEAD in name.split(".")

    @property
    def max_length(self) -> int:
        """Longest allowed row in tokens: rollout.maxSequenceLength, or else the model's limit."""
        return int(self.cfg.rollout.max_sequence_length or self.model_config.max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the model."""
        return int(self.model_config.hidden_size)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Give the model the weights of the reference policy inside the block.

        Raises RuntimeError where no KL term needs one, while the weights are offloaded, and between a backward pass and its optimizer step.
        """
        if self._reference is None:
            raise RuntimeError(
                "the reference policy is kept only with algorithm.loss.klCoefficient or rewardKlCoefficient above 0, got 0; set one"
            )
        self.residency.require_loaded("the reference policy")
        self.wait_for_readers()
        with self._reference.swapped():
            yield

    def renew_reference(self, step: int) -> None:
        """Copy the present weights to a reference policy with weights of its own, if that is due after training step `step`. Not collective."""
        interval = self.cfg.algorithm.reference_update_steps
        if interval is not None and step % interval == 0 and isinstance(self._reference, ReferencePolicy):
            self.residency.require_loaded("renewing the reference policy")
            self.wait_for_readers()
            self._reference.renew()

    # Steps ----------------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Clip and apply the gradients.

        Returns the norm before clipping and the learning rate of each parameter group in this step. If the norm is not finite, no rank
        updates: the gradients are dropped and the step is counted as skipped. With `actor.offload.optimizer` the moments are loaded for
        this step only. Raises DataError after more than `actor.maxConsecutiveSkips` consecutive skips, and RuntimeError while weights or
        moments are offloaded.
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
        """Whether a critic is trained with the policy."""
        return self.cfg.algorithm.critic_of_actor is not None

    @property
    def _warming_up(self) -> bool:
        """Whether the next optimizer step trains the critic only."""
        return self.counts.applied < self.cfg.actor.critic_warmup_steps

    @property
    def _applied_in_phase(self) -> int:
        """Number of applied optimizer steps in the present phase: critic warm-up, or the training after it.

        Schedule and moments start anew with each phase.
        """
        return self.counts.applied - (0 if self._warming_up else self.cfg.actor.critic_warmup_steps)

    def _scheduled_steps(self, steps: int | None = None) -> int:
        """Return the number of optimizer steps that train the policy in a run of `steps` steps. None means algorithm.steps."""
        algorithm = self.cfg.algorithm
        steps = algorithm.steps if steps is None else steps
        total = steps * algorithm.update_epochs * algorithm.optimizer_steps_per_batch
        return total - self.cfg.actor.critic_warmup_steps

    def set_global_step(self, global_step: int) -> None:
        """Set the last trained step, which is the version of the weights. Raises ValueError when it is negative or goes back."""
        if global_step < max(self.global_step, 0):
            raise ValueError(f"global_step must be {self.global_step} or more, got {global_step}; steps only rise")
        self.global_step = global_step

    # Offloading -----------------------------------------------------------------------------------------------------

    def offload_param_and_grad(self, offload_grad: bool = False) -> None:
        """Move the weights to host memory; with `offload_grad` also drop the gradients. Not collective.

        Raises RuntimeError when gradients that no optimizer step has applied would be dropped.
        """
        if offload_grad:
            self.residency.offload_gradients()
        self.residency.offload_weights()

    def load_param_and_grad(self, device_id: int, load_grad: bool = False) -> None:
        """Move the weights back to the device, bit-equal in the same tensor objects. Not collective.

        With `load_grad` gradients are allocated too, all zero. `device_id` is the index of the rank's accelerator and is ignored on a CPU.
        Raises ValueError when there is no such accelerator.
        """
        self._check_device(device_id)
        self.residency.load_weights()
        if load_grad:
            self.residency.load_gradients()

    def offload_optimizer(self) -> None:
        """Move the optimizer's moments to host memory. Not collective."""
        self.residency.offload_optimizer()

    def load_optimizer(self, device_id: int) -> None:
        """Move the optimizer's moments back, bit-equal. `device_id` is as for `load_param_and_grad`. Not collective."""
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
        """Write and sync this rank's part of a checkpoint.

        The part consists of shards of model and optimizer, the random state and, on rank 0, the counters. Returns path below `save_path` ->
        digest. With `in_background` it returns an awaitable of that at once. A thread then copies the state and writes the copy; the next
        optimizer step waits until the state is copied, and the next save until it is written. Raises InfrastructureError when the storage
        fails.
        """
        with self.residency.loaded(), self._file_work(), self.ranks.guard("saving a checkpoint"):
            part = checkpoint.RankPart.of(
                self.ranks,
                self._counters(step),
                model=self._written(self.master_slices()),
                optimizer=self._written(self.moment_slices()),
                reference=self._written(self._reference_slices(renewed=True), updated=False),
            )
            if not in_background:
                return part.write(Path(save_path))
            future = self._background.write(part, Path(save_path))
        return _awaited(future)

    def wait_for_readers(self) -> None:
        """Wait until a background save has copied weights and moments. Not collective."""
        self._background.wait_copied()

    def _reference_slices(self, *, renewed: bool = False) -> Slices:
        """Return the parts of the reference policy that this rank keeps, float32; none where there is none of its own.

        With `renewed` also none where it is the initial model, which no checkpoint needs.
        """
        reference = self._reference
        if not isinstance(reference, ReferencePolicy) or (renewed and not reference.is_renewed):
            return {}
        return reference.slices(self._policy_slices())

    def _policy_slices(self) -> Slices:
        return {name: parts for name, parts in self.named_slices().items() if not is_critic_name(name)}

    def _counters(self, step: int) -> checkpoint.Counters:
        return checkpoint.Counters(
            step=step,
            global_step=self.global_step,
            world_size=self.ranks.size,
            counts=self.counts,
            consecutive_skips=self.consecutive_skips,
            optimizer_steps=self._step_counters(),
            lora=self._lora_identity,
        )

    def _file_work(self) -> AbstractContextManager[None]:
        """Return a context manager inside which ranks wait for each other as long as the runner waits for the whole call."""
        return self.ranks.collectives_within(self.cfg.runtime.deadlines.group_method)

    @cached_property
    def _lora_identity(self) -> dict[str, Any] | None:
        """Adapter settings and digest of their base, which a checkpoint must match; None without adapters. Collective: rank 0 reads the base."""
        lora = self.cfg.model.lora
        if lora is None:
            return None
        base = hf.weights_digest(self.cfg.model.path) if self.ranks.rank == 0 else ""
        return identity(lora, base=self.ranks.gather(base)[0])

    def load_checkpoint(self, load_path: str) -> None:
        """Load what `save_checkpoint` wrote on any number of ranks.

        Raises FileNotFoundError when there is no checkpoint, and DataError when it is damaged or of another model.
        """
        with self.residency.loaded(), self._file_work(), self.ranks.guard("loading a checkpoint"):
            self.wait_for_readers()
            saved = checkpoint.Counters.read(Path(load_path))
            check_same_adapters(saved.lora, self._lora_identity, base=self.cfg.model.path)
            self._before_state(saved.counts)
            weights, moments, reference = self.master_slices(), self.moment_slices(), self._reference_slices()
            counters = checkpoint.load(
                Path(load_path),
                self.ranks,
                model=weights,
                optimizer=moments,
                reference=reference,
                seed=self.cfg.algorithm.seed,
            )
            if isinstance(self._reference, ReferencePolicy) and checkpoint.has_reference(Path(load_path)):
                self._reference.restore(self._policy_slices(), reference)
            self.global_step = counters.global_step
            self.consecutive_skips = counters.consecutive_skips
            self._resume(weights, moments, counters.optimizer_steps)

    def get_model_state_dict(self, cpu_offload: bool, full_state_dict: bool) -> dict[str, Tensor]:
        """Return the policy's weights by Hugging Face name. Adapters are merged into whole tensors.

        With `full_state_dict` rank 0 gets whole tensors and the others {}; otherwise each rank gets what it stores of each tensor. `cpu_offload`
        returns copies on the CPU. Raises RuntimeError while the weights are offloaded.
        """
        self.residency.require_loaded("get_model_state_dict")
        if not full_state_dict:
            stored = self._policy_slices()
            tensors = {
                name: parts[0].tensor if len(parts) == 1 else torch.cat([part.tensor for part in parts])
                for name, parts in stored.items()
            }
        else:
            with self.ranks.guard("gathering the weights"):
                tensors = self._whole_tensors()
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in tensors.items()}

    @property
    def _weight_dtype(self) -> str:
        """Type in which the backend stores floating-point weights."""
        return self.cfg.model.dtype

    def _whole_tensors(self) -> dict[str, Tensor]:
        """Return whole tensors by name on rank 0, where tied names share a tensor; {} on the other ranks."""
        source = self.version_source(self._weight_dtype, 1)
        tensors: dict[str, Tensor] = {}
        if self.ranks.rank == 0:
            for bucket in source.buckets(str(self.compute_device)):
                for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                    tensors[source.entries[index].name] = tensor
            tensors |= {entry.name: tensors[entry.alias_of] for entry in source.entries if entry.alias_of is not None}
        source.finish()
        return tensors

    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face model folder at `path` with weights in `dtype` (None: model.dtype).

        Adapters are merged, and lie in its folder `adapter` as `peft` loads them.
        Weights that were not trained are bit-equal to those of `model.path`, where there are adapters rounded to `model.dtype`. Raises
        InfrastructureError on every rank when rank 0 cannot write.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one")
        with self.residency.loaded(moments=False), self._file_work(), self.ranks.guard("exporting the model"):
            # One tensor at a time: rank 0 never holds the whole model.
            source = self.version_source(dtype or self.cfg.model.dtype, 1)
            files = self._adapter_files()
            refusal: InfrastructureError | None = None
            if self.ranks.rank == 0:
                try:
                    self._export(path, source, files)
                except InfrastructureError as error:
                    refusal = error
            # All ranks gather every tensor; leaving early would leave the others waiting.
            source.finish()
            refused = self.ranks.all_reduce_max(int(refusal is not None))
        if refused:
            raise refusal or InfrastructureError(f"actor rank 0 could not export the model to {path}; see its log")

    def _export(self, path: str, source: GatheredSource, files: Mapping[str, bytes]) -> None:
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
        export.export_folder(path, source=self.cfg.model.path, plans=plans, tensors=tensors, files=files)


async def _awaited(future: "concurrent.futures.Future[dict[str, str]]") -> dict[str, str]:
    return await asyncio.wrap_future(future)


def validated(cfg: RLJobSpec | Mapping[str, Any]) -> RLJobSpec:
    """Return `cfg` as a job's spec. A mapping is validated."""
    return cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))
