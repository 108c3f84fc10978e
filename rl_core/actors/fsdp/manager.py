"""A model, its optimizer and its schedule under FSDP1 or FSDP2. No reinforcement learning here."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors import guards, hf, lora
from rl_core.actors.critic import attach_critic, has_own_decoder, is_critic_name
from rl_core.actors.families import check_family
from rl_core.actors.forward import SCORE, attach_scoring
from rl_core.actors.fsdp.compiling import compile_layers
from rl_core.actors.fsdp.optimizer import (
    build_adamw,
    build_scheduler,
    replace_schedule,
    resume_schedule,
    set_step_counters,
    step_counters,
)
from rl_core.actors.fsdp.recompute import selective_contexts
from rl_core.actors.fsdp.strategy import FSDP1Strategy, FSDP2Strategy, Strategy
from rl_core.actors.manager import ModelManager, validated
from rl_core.actors.published import WholeTensor
from rl_core.actors.ranks import ParallelSizes
from rl_core.actors.schedule import CRITIC, MOMENTS, LRSchedule, OptimizerCounts
from rl_core.actors.slices import LocalSlice, Slices, slices_in_folder
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.optimizer import OptimizerSpec
from rl_core.weights.manifest import is_adapter_name
from rl_core.weights.stored_parts import StoredPart, stored_parts

STRATEGIES: dict[str, type[Strategy]] = {"fsdp1": FSDP1Strategy, "fsdp2": FSDP2Strategy}
"""Strategy by the value of actor.backend."""


class FSDPModelManager(ModelManager):
    """One data-parallel rank's part of a model in training. Methods are collective unless they say otherwise."""

    model: "nn.Module"
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    _stored_parts: Mapping[str, StoredPart] = MappingProxyType({})
    """The tensors of a model folder that are no whole parameters of the same name, by name; see `stored_parts`."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], world_size: int, rank: int) -> None:
        """Join the other ranks. `cfg` is the job's spec, or a mapping that is validated into one.

        Raises ValueError for a rank outside [0, world_size), and ConfigError when accelerators are requested and none is visible and for
        another backend than fsdp1 and fsdp2.
        """
        super().__init__(validated(cfg), ParallelSizes(data=world_size), rank)
        actor = self.cfg.actor
        if actor.backend not in STRATEGIES:
            raise ConfigError(f"actor.backend must be one of {', '.join(STRATEGIES)}, got {actor.backend}; change it")
        self.strategy = STRATEGIES[actor.backend](
            self.ranks,
            compute_dtype=self.dtype,
            accumulate_without_sync=actor.accumulate_without_sync,
            replicas=actor.parallel.replicate,
        )
        self._rates: OptimizerSpec = actor.optimizer
        """The optimizer's settings with the present peak learning rate; see `set_schedule`."""
        self._steps: int | None = None
        """Steps of the run, if `set_schedule` has changed them."""

    # Set-up ---------------------------------------------------------------------------------------------------------

    def model_provider_func(self) -> nn.Module:
        """Return the unwrapped causal LM of `model.path` in `model.dtype`, with adapters and a critic if the job has them.

        It is on the meta device; weights are loaded after wrapping.
        """
        config = hf.read_config(self.cfg.model.path)
        guards.check(self.cfg, config)
        check_family(config)
        model = hf.build_model(config, dtype=self.dtype)
        attach_scoring(model, float32_head=self.cfg.model.float32_head)
        if (critic := self.cfg.algorithm.critic_of_actor) is not None:
            decoder = hf.build_model(config, dtype=self.dtype).model if critic.separate else None
            attach_critic(model, model.config.hidden_size, decoder)
        if (adapters := self.cfg.model.lora) is not None:
            lora.attach_adapters(model, adapters)
        return model

    def _set_up(self) -> None:
        self.model = self._build()
        self._begin_phase()

    @property
    def model_config(self) -> Any:
        """The transformers configuration of the model."""
        return self.model.config

    def _parameter_tensors(self) -> list[Tensor]:
        policy = [parameter for name, parameter in self.model.named_parameters() if not is_critic_name(name)]
        return [self.strategy.local(parameter.detach()) for parameter in policy]

    def _build(self) -> nn.Module:
        model = self.model_provider_func()
        self._set_modes(model)
        aliases = hf.tied_names(model)
        self._stored_parts = stored_parts(model)
        self.sync_names = [
            (name, aliases.get(name))
            for name in hf.stored_names(model, self._stored_parts)
            if not is_critic_name(name) and not is_adapter_name(name)
        ]
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if self.dtype != torch.float32:
            self._set_types(model)
        if self.compute_device.type == "cpu":
            from rl_core.cpu.tuning import tune

            tune(model, compiled=self.cfg.actor.compile)
        if self.cfg.actor.compile:
            compile_layers(model)
        methods = [SCORE] if hasattr(model, SCORE) else []
        model = self.strategy.wrap(model, device=self.compute_device, aliases=aliases, methods=methods)
        if on_meta:
            slices = slices_in_folder(self.strategy.named_slices(model), self._stored_parts)
            hf.load_weights(model, self.cfg.model.path, aliases, slices=slices)
        self._round_frozen(model)
        stored = hf.named_parameters(model).items()
        lora.initialize({name: [self.strategy.slice_of(tensor)] for name, tensor in stored}, self.cfg.algorithm.seed)
        return model

    def _set_types(self, model: nn.Module) -> None:
        """Set the dtypes in which parameters are stored when `cfg.model.dtype` is a half-precision dtype.

        Trained parameters are float32, because half precision would lose small updates. Frozen parameters have `cfg.model.dtype` where the
        strategy allows several dtypes in a unit, else float32. Forward and backward compute in `cfg.model.dtype` in both cases.
        """
        model.float()
        for name, parameter in model.named_parameters():
            if self.strategy.allows_several_types and not self._is_trained(name):
                parameter.data = parameter.data.to(self.dtype)

    def _round_frozen(self, model: nn.Module) -> None:
        """Round frozen parameters in place to values of `cfg.model.dtype`, so that all backends publish and export the same weights.

        The dtypes in which they are stored do not change.
        """
        for name, parameter in hf.named_parameters(model).items():
            stored = self.strategy.local(parameter).detach()
            if not self._is_trained(name) and stored.dtype != self.dtype:
                stored.copy_(stored.to(self.dtype))

    def _layers_with_adapters(self) -> nn.Module:
        return self.model

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
            options: dict[str, Any] = {"use_reentrant": False}
            if self.cfg.actor.gradient_checkpointing_mode == "selective":
                options["context_fn"] = selective_contexts()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            # transformers makes the embeddings want gradients, so that these would flow through layers below all that is trained.
            model.disable_input_require_grads()

    def _begin_phase(self) -> None:
        """Build optimizer and schedule for the parameters that are trained from here on.

        In the critic's warm-up that is the critic only; afterwards everything is trained, with new moments.
        """
        self.optimizer = self.build_optimizer(self.model, enable_critic_warmup=self._warming_up)
        self.scheduler = self.build_lr_scheduler(self.optimizer, self._rates)

    def _before_state(self, counts: OptimizerCounts) -> None:
        warming_up = self._warming_up
        super()._before_state(counts)
        if self._warming_up != warming_up:
            self._begin_phase()

    def build_optimizer(self, model: nn.Module, enable_critic_warmup: bool = False) -> torch.optim.Optimizer:
        """Return AdamW with allocated state. With `enable_critic_warmup` it trains only the critic, and the policy is frozen.

        Raises ConfigError when a model without a critic is to be warmed up.
        """
        parameters = dict(model.named_parameters())
        if enable_critic_warmup and not any(map(is_critic_name, parameters)):
            raise ConfigError(
                "critic warm-up needs a model with a value_head, got a policy; set enable_critic_warmup to False"
            )
        for name, parameter in parameters.items():
            parameter.requires_grad_(self._is_trained(name) and (is_critic_name(name) or not enable_critic_warmup))
        self.strategy.follow_requires_grad(model)
        return build_adamw(model, self._rates, self.strategy.dims)

    def build_lr_scheduler(
        self, optimizer: torch.optim.Optimizer, optim_config: OptimizerSpec | Mapping[str, Any]
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the learning rate schedule for the run's optimizer steps after critic warm-up.

        Its step counter is the number of applied optimizer steps.
        """
        return build_scheduler(optimizer, LRSchedule.from_spec(optim_config, total=self._scheduled_steps(self._steps)))

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """
        optimizer = self.cfg.actor.optimizer.model_copy(update={"learning_rate": learning_rate})
        schedule = LRSchedule.from_spec(optimizer, total=self._scheduled_steps(steps))
        replace_schedule(self.optimizer, self.scheduler, schedule, optimizer, applied=self._applied_in_phase)
        self._rates, self._steps = optimizer, steps

    # Steps ----------------------------------------------------------------------------------------------------------

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context manager of one micro-batch.

        With `actor.accumulateWithoutSync`, gradients are reduced over the ranks with the last micro-batch only, otherwise with each.
        """
        return self.strategy.before_micro_batch(model, is_last=is_last_micro_batch)

    def _models(self) -> list[list[nn.Parameter]]:
        """Return the trained parameters of each model that is clipped separately: the policy, and a critic with a decoder of its own."""
        groups = self.optimizer.param_groups
        models = [(False,), (True,)] if has_own_decoder(self.model) else [(False, True)]
        return [[p for group in groups if group[CRITIC] in model for p in group["params"]] for model in models]

    def _gradient_norm(self) -> float:
        self._clipped = self._models()
        # The norms are moved to the CPU, because a rank without gradients of a model has its zero there.
        squares = torch.stack([self.strategy.local_squared_grad_norm(parameters).cpu() for parameters in self._clipped])
        self._norms = [math.sqrt(square) for square in self.ranks.sum_over_data_ranks(squares).tolist()]
        return math.hypot(*self._norms)

    def _apply_gradients(self, norm: float) -> None:
        clip = self.cfg.actor.grad_clip
        for parameters, model_norm in zip(self._clipped, self._norms, strict=True):
            if clip is not None and model_norm + 1e-6 > clip:
                self.strategy.scale_grads(parameters, clip / (model_norm + 1e-6))
        self.optimizer.step()

    def _follow_schedule(self) -> None:
        if self.counts.applied == self.cfg.actor.critic_warmup_steps:
            self._begin_phase()
        else:
            self.scheduler.step()

    def _learning_rates(self) -> list[float]:
        rates = super()._learning_rates()
        return [0.0, *rates] if self._warming_up else rates

    def drop_gradients(self) -> None:
        """Discard the gradients that are reduced. Not collective.

        Gradients that FSDP has accumulated without reducing, before the last micro-batch, are kept; the caller reduces them first.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.strategy.drop_grads(self.model)

    # OffloadManager ------------------------------------------------------------------------------------------------------

    def weight_tensors(self) -> Iterator[Tensor]:
        """Return the parameters and buffers that this rank stores. Not collective."""
        return map(self.strategy.local, [*self.model.parameters(), *self.model.buffers()])

    def moment_tensors(self) -> list[Tensor]:
        """Return the optimizer state that this rank stores, without the step counters. Not collective."""
        return [self.strategy.local(state[moment]) for state in self.optimizer.state.values() for moment in MOMENTS]

    def has_gradients(self) -> bool:
        """Return whether memory for gradients is allocated: by a backward pass, or by `allocate_gradients`. Not collective."""
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def has_pending_gradients(self) -> bool:
        """Return whether there are gradients that no optimizer step has applied. Not collective."""
        grads = [self.strategy.local(p.grad) for p in self.model.parameters() if p.grad is not None]
        return any(bool(grad.count_nonzero()) for grad in grads)

    def release_gradients(self) -> None:
        """Free the memory of the gradients. Not collective."""
        self.drop_gradients()

    def allocate_gradients(self) -> None:
        """Allocate gradients that are all zero. Not collective."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    # State ----------------------------------------------------------------------------------------------------------

    def get_model_state_dict(self, cpu_offload: bool, full_state_dict: bool) -> dict[str, Tensor]:
        """Return the weights as `ModelManager.get_model_state_dict` does.

        Without `full_state_dict` the tensors share memory with the model, unless copied; under FSDP2 they are DTensors. They are then the
        model's parameters: adapters are tensors of their own, and the experts of a layer are one.
        """
        if full_state_dict:
            return super().get_model_state_dict(cpu_offload, full_state_dict)
        self.residency.require_loaded("get_model_state_dict")
        stored = hf.named_tensors(self.model)
        tied = {name: target for name, target in self.sync_names if target is not None}
        names = [*(name for name in stored if not is_critic_name(name)), *tied]
        tensors = {name: self.strategy.shard(stored[tied.get(name, name)]) for name in names}
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in tensors.items()}

    @property
    def _weight_dtype(self) -> str:
        return "float32"  # whatever type they compute in

    def named_slices(self) -> Slices:
        """Return the parts of the weights that this rank stores, by Hugging Face name; tied weights once. Not collective."""
        return slices_in_folder(self.strategy.named_slices(self.model), self._stored_parts)

    def master_slices(self) -> Slices:
        """Return the parameters that are trained, which are the float32 master weights here, and the buffers. Not collective."""
        frozen = {name for name in hf.named_parameters(self.model) if not self._is_trained(name)}
        slices = self.strategy.named_slices(self.model).items()
        return slices_in_folder({name: part for name, part in slices if name not in frozen}, self._stored_parts)

    def moment_slices(self) -> Slices:
        """Return the parts of the optimizer's moments that this rank stores, sharing memory. Not collective."""
        slices_by_name: dict[str, Sequence[LocalSlice]] = {}
        for moment in MOMENTS:
            slices = {
                name: self.strategy.slice_of(self.optimizer.state[parameter][moment], like=parameter)
                for name, parameter in hf.named_parameters(self.model).items()
                if parameter in self.optimizer.state
            }
            slices_by_name |= {
                f"{name}.{moment}": parts for name, parts in slices_in_folder(slices, self._stored_parts).items()
            }
        return slices_by_name

    def _written(self, slices: Slices, *, updated: bool = True) -> Slices:
        if self.ranks.rank >= self.strategy.copy_size:
            return {}
        return {name: parts for name, parts in slices.items() if self.ranks.rank == 0 or not parts[0].replicated}

    def _step_counters(self) -> dict[str, float]:
        # Under FSDP1 a parameter takes its steps on the ranks that have elements of it.
        counters = self.ranks.gather(step_counters(self.model, self.optimizer))
        return {name: max(counter[name] for counter in counters) for name in counters[0]}

    def _resume(self, weights: Slices, moments: Slices, steps: Mapping[str, float]) -> None:
        # The slices share memory with model and optimizer, so their values are loaded already.
        set_step_counters(self.model, self.optimizer, steps)
        resume_schedule(self.optimizer, self.scheduler, applied=self._applied_in_phase)

    def _whole_shapes(self) -> dict[str, WholeTensor]:
        return {name: WholeTensor(parts[0].shape, parts[0].tensor) for name, parts in self.named_slices().items()}


def _dropout(model: nn.Module) -> float:
    """Return the largest dropout rate of the model."""
    rates = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        for module in model.modules()
    ]
    return max(map(float, rates))
