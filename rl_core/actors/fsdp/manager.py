"""A model, its optimizer and its schedule under FSDP2: set up, step, state, save, load, export. No reinforcement learning here."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors import export, hf
from rl_core.actors.forward import SCORE, attach_scoring
from rl_core.actors.fsdp import checkpoint
from rl_core.actors.fsdp.optimizer import (
    build_adamw,
    build_scheduler,
    named_moments,
    replace_schedule,
    resume_schedule,
    set_step_counters,
    step_counters,
)
from rl_core.actors.fsdp.residency import Residency
from rl_core.actors.fsdp.strategy import FSDP2Strategy
from rl_core.actors.ranks import ParallelSizes, Ranks
from rl_core.actors.schedule import LRSchedule, OptimizerCounts
from rl_core.actors.slices import LocalSlice
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.roles import OptimizerSpec

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPModelManager(Residency):
    """One data-parallel rank's share of a model in training. Methods are collective unless they say otherwise."""

    model: "nn.Module"
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], world_size: int, rank: int) -> None:
        """Join the ranks. `cfg`: the job's spec, or a mapping that is validated into it.

        Raises ValueError for a rank outside [0, world_size), ConfigError for accelerators asked for and not visible.
        """
        self.cfg = cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))
        self.compute_device = compute_device(self.cfg, rank)
        self.ranks = Ranks(
            ParallelSizes(data=world_size),
            rank=rank,
            device=self.compute_device,
            timeout=self.cfg.runtime.deadlines.collective,
        )
        self.dtype = DTYPES[self.cfg.model.dtype]
        self.strategy = FSDP2Strategy(
            self.ranks, compute_dtype=self.dtype, accumulate_without_sync=self.cfg.actor.accumulate_without_sync
        )
        self.counts = OptimizerCounts()
        self.consecutive_skips: list[float] = []
        """Norms of the steps skipped in a row."""
        self.global_step = 0
        self.sync_names: list[tuple[str, str | None]] = []
        """Names to sync and export in the model's order: (name, the name it is tied to or None)."""
        Residency.__init__(self)

    # Set-up ---------------------------------------------------------------------------------------------------------

    def model_provider_func(self) -> nn.Module:
        """Return the unwrapped causal LM of `model.path` in `model.dtype`, on the meta device: weights come after wrapping."""
        model = hf.build_model(hf.read_config(self.cfg.model.path), dtype=self.dtype)
        attach_scoring(model)
        return model

    def setup_model_and_optimizer(self) -> None:
        """Build, wrap and fill the model; build optimizer and schedule. Raises RuntimeError when called twice."""
        if hasattr(self, "model"):
            raise RuntimeError("setup_model_and_optimizer must be called once, got a second call; make a new manager")
        with self.ranks.guard("setting up the model"):
            self.model = self._build()
            self.optimizer = self.build_optimizer(self.model)
            self.scheduler = self.build_lr_scheduler(self.optimizer, self.cfg.actor.optimizer)

    def _build(self) -> nn.Module:
        model = self.model_provider_func()
        self._set_modes(model)
        aliases = hf.tied_names(model)
        self.sync_names = [(name, aliases.get(name)) for name in hf.stored_names(model)]
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        # Half precision computes in it and keeps float32 weights to update: small steps would be lost in bfloat16.
        model = model.float() if self.dtype != torch.float32 else model
        if self.compute_device.type == "cpu":
            from rl_core.actors.cpu.tuning import tune

            tune(model)
        model = self.strategy.wrap(model, methods=[SCORE] if hasattr(model, SCORE) else [])
        if on_meta:
            hf.materialize(model, self.compute_device, aliases)
            hf.load_weights(model, self.cfg.model.path, aliases, slice_of=self.strategy.slice_of)
        return model.to(self.compute_device)

    def _set_modes(self, model: nn.Module) -> None:
        model.train()
        if not self.cfg.actor.dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
        elif self.cfg.algorithm.recompute_log_probs and (rate := _dropout(model)) > 0:
            raise ConfigError(
                f"actor.dropout must be false with algorithm.recomputeLogProbs, whose ratios it would fill with noise, got true and "
                f"a model with dropout {rate}; remove one of them"
            )
        if self.cfg.actor.gradient_checkpointing:
            if not getattr(model, "supports_gradient_checkpointing", False):
                raise ConfigError(
                    f"actor.gradientCheckpointing must be false for {type(model).__name__}, which does not support it, got true; remove it"
                )
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def build_optimizer(self, model: nn.Module, enable_critic_warmup: bool = False) -> torch.optim.Optimizer:
        """Return AdamW with its state in place. Critic warm-up needs a value head: ConfigError without one."""
        if enable_critic_warmup:
            raise ConfigError(
                "critic warm-up needs a model with a value_head, got a policy; set enable_critic_warmup to False"
            )
        return build_adamw(model, self.cfg.actor.optimizer)

    def build_lr_scheduler(
        self, optimizer: torch.optim.Optimizer, optim_config: OptimizerSpec | Mapping[str, Any]
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the schedule over all optimizer steps of the run; its argument is the number of applied ones."""
        return build_scheduler(
            optimizer, LRSchedule.from_spec(optim_config, total=self._optimizer_steps(self.cfg.algorithm.steps))
        )

    def _optimizer_steps(self, steps: int) -> int:
        algorithm = self.cfg.algorithm
        return steps * algorithm.update_epochs * algorithm.optimizer_steps_per_batch

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Go on with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """
        optimizer = self.cfg.actor.optimizer.model_copy(update={"learning_rate": learning_rate})
        schedule = LRSchedule.from_spec(optimizer, total=self._optimizer_steps(steps))
        replace_schedule(self.optimizer, self.scheduler, schedule, applied=self.counts.applied)

    # Steps ----------------------------------------------------------------------------------------------------------

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: gradients are reduced with the last (or each, accumulateWithoutSync false)."""
        return self.strategy.before_micro_batch(model, is_last=is_last_micro_batch)

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Clip and apply the gradients; return the norm before clipping and each group's learning rate in this step.

        A norm that is not finite on any rank changes nothing on all: gradients are zeroed and the skip is counted.
        Raises DataError after more than `actor.maxConsecutiveSkips` skips in a row, RuntimeError while weights or moments are offloaded.
        """
        self._require_loaded("optimizer_step", moments=True)
        parameters = list(self.model.parameters())
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        norm = math.sqrt(float(self.ranks.sum_rows(self.strategy.grad_norm(parameters).cpu())))
        self.counts.attempted += 1
        if math.isfinite(norm):
            clip = self.cfg.actor.grad_clip
            if clip is not None and norm + 1e-6 > clip:
                self.strategy.scale_grads(parameters, clip / (norm + 1e-6))
            self.optimizer.step()
            self.counts.applied += 1
            self.scheduler.step()
            self.consecutive_skips = []
        self.drop_gradients()
        if not math.isfinite(norm):
            self._count_skip(norm)
        return norm, rates

    def drop_gradients(self) -> None:
        """Forget the gradients. Not collective; what FSDP has not reduced yet, before the last micro-batch, is not among them."""
        self.optimizer.zero_grad(set_to_none=True)

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

    # State ----------------------------------------------------------------------------------------------------------

    def get_model_state_dict(self, cpu_offload: bool, full_state_dict: bool) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name.

        full: rank 0 gets whole tensors, the others {}. Not full: DTensors that share memory with the model, unless
        `cpu_offload` copies them. Raises RuntimeError while the weights are offloaded.
        """
        self._require_loaded("get_model_state_dict")
        if not full_state_dict:
            held = {name: self.strategy.as_dtensor(self._tensor(name).detach()) for name, _ in self.sync_names}
            return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in held.items()}
        with self.ranks.guard("gathering the weights"):
            whole = {name: tensor for name, tensor in self.whole_tensors() if self.ranks.rank == 0}
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in whole.items()}

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) on every rank, one at a time; tied names yield the same tensor again."""
        shared: dict[str, Tensor] = {}
        tied_to = {source for _, source in self.sync_names if source is not None}
        for name, source in self.sync_names:
            tensor = shared[source] if source is not None else self.strategy.whole(self._tensor(name).detach())
            if name in tied_to:
                shared[name] = tensor
            yield name, tensor

    def _tensor(self, name: str) -> Tensor:
        module, _, attribute = name.rpartition(".")
        return getattr(self.model.get_submodule(module), attribute)

    def named_slices(self) -> dict[str, LocalSlice]:
        """Return what this rank stores of the weights by Hugging Face name, tied ones once. Not collective."""
        return self.strategy.named_slices(self.model)

    def set_global_step(self, global_step: int) -> None:
        """Set the step (the weights' version). Raises ValueError when it is negative or goes back."""
        if global_step < max(self.global_step, 0):
            raise ValueError(f"global_step must be {self.global_step} or more, got {global_step}; steps only rise")
        self.global_step = global_step

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        """Write and sync this rank's shards of model and optimizer, its random state and, on rank 0, the counters."""
        with self.loaded(), self.ranks.guard("saving a checkpoint"):
            moments = named_moments(self.model, self.optimizer)
            checkpoint.save(
                Path(save_path),
                self.ranks,
                self._counters(step),
                model=self.named_slices(),
                optimizer={name: self.strategy.slice_of(moment) for name, moment in moments.items()},
            )

    def _counters(self, step: int) -> checkpoint.Counters:
        return checkpoint.Counters(
            step=step,
            global_step=self.global_step,
            world_size=self.ranks.size,
            counts=self.counts,
            consecutive_skips=self.consecutive_skips,
            optimizer_steps=step_counters(self.model, self.optimizer),
        )

    def load_checkpoint(self, load_path: str) -> None:
        """Load what `save_checkpoint` wrote, on any number of ranks.

        Raises FileNotFoundError when there is no checkpoint, DataError for a damaged one or one of another model.
        """
        with self.loaded(), self.ranks.guard("loading a checkpoint"):
            counters = checkpoint.load(
                Path(load_path),
                self.ranks,
                model=hf.stored_tensors(self.model),
                optimizer=named_moments(self.model, self.optimizer),
                seed=self.cfg.algorithm.seed,
            )
            self.counts, self.global_step = counters.counts, counters.global_step
            self.consecutive_skips = counters.consecutive_skips
            set_step_counters(self.model, self.optimizer, counters.optimizer_steps)
            resume_schedule(self.optimizer, self.scheduler, applied=self.counts.applied)

    def export_hf(self, path: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder in `dtype` (None: model.dtype); unchanged weights come out bit-equal.

        Raises InfrastructureError on every rank when rank 0's storage refuses.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one")
        wanted = self.dtype if dtype is None else DTYPES[dtype]
        own = [name for name, source in self.sync_names if source is None]
        plans = [export.TensorPlan(name=n, shape=tuple(self._tensor(n).shape), dtype=wanted) for n in own]
        with self.loaded(), self.ranks.guard("exporting the model"):
            tensors = ((n, self.strategy.whole(self._tensor(n).detach())) for n in own)
            refusal: InfrastructureError | None = None
            if self.ranks.rank == 0:
                try:
                    export.export_folder(path, source=self.cfg.model.path, plans=plans, tensors=tensors)
                except InfrastructureError as error:
                    refusal = error
            # All ranks gather every tensor; leaving early would leave the others waiting.
            for _ in tensors:
                pass
            refused = self.ranks.largest(int(refusal is not None))
        if refused:
            raise refusal or InfrastructureError(f"actor rank 0 could not export the model to {path}; see its log")


def _dropout(model: nn.Module) -> float:
    """Return the largest dropout rate of the model."""
    rates = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        for module in model.modules()
    ]
    return max(map(float, rates))


def compute_device(cfg: RLJobSpec, rank: int) -> torch.device:
    """Return the device a rank trains on. Raises ConfigError when accelerators are asked for and none is visible."""
    if not cfg.actor.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"actor.gpus asks for {cfg.actor.gpus} accelerators, got none visible; run on such a machine or set it to 0"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
