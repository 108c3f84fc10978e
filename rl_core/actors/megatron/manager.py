"""A model, its optimizer and its schedule under megatron-core. No reinforcement learning here."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rl_core.actors import guards, hf, lora
from rl_core.actors.critic import SEPARATE, is_critic_name
from rl_core.actors.manager import ModelManager, validated
from rl_core.actors.megatron import cpu, library
from rl_core.actors.megatron.convert import EMBEDDING, TensorParallelLayout, global_parameters
from rl_core.actors.megatron.lora import attach_adapters, dropout_drawn_from
from rl_core.actors.megatron.model import build_model, rotary_embedding, transformer_config
from rl_core.actors.megatron.optimizer import OptimizerShard, build_optimizer, gradient_norm, open_shards
from rl_core.actors.published import WholeTensor
from rl_core.actors.ranks import ParallelSizes
from rl_core.actors.schedule import CRITIC, MOMENTS, LRSchedule, peak_rate
from rl_core.actors.slices import LocalSlice, Slices
from rl_core.api.job import RLJobSpec
from rl_core.weights.manifest import is_adapter_name

_RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}
"""Settings of megatron by actor.gradientCheckpointingMode. Its flash attention always recomputes the values that it does not store."""


class MegatronModelManager(ModelManager):
    """One rank's part of a model in training. Methods are collective unless they say otherwise."""

    optimizer: "library.MegatronOptimizer"
    stages: list[Any]
    """The parts of the model on this rank, wrapped for data parallelism, in the model's order."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], world_size: int, rank: int) -> None:
        """Join the other ranks. `cfg` is the job's spec, or a mapping that is validated into one.

        Raises ValueError for a rank outside [0, world_size), and ConfigError for settings that this backend does not support.
        """
        cfg = validated(cfg)
        if cfg.actor.gpus and cfg.actor.parallel.tensor > 1:
            # megatron overlaps the communication of a tensor-parallel layer with its computation only when both go to the device in order.
            # Read when CUDA is initialised, which the base class does.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self._hf_config = hf.read_config(cfg.model.path)
        guards.check(cfg, self._hf_config)
        self.parallel = cfg.actor.parallel
        data = world_size // self.parallel.model
        sizes = ParallelSizes(data=data, tensor=self.parallel.tensor, pipeline=self.parallel.pipeline)
        super().__init__(cfg, sizes, rank)
        self._distributed = cfg.actor.optimizer.distributed and data > 1
        self._rates = self.cfg.actor.optimizer
        self._schedule = LRSchedule.from_spec(self._rates, total=self._scheduled_steps())

    def device_context(self) -> AbstractContextManager[None]:
        """Return a context manager inside which megatron computes on this rank's device, in the calling thread."""
        return cpu.cpu_as_cuda() if self.compute_device.type == "cpu" else nullcontext()

    def dropout_context(self, *, forward_only: bool) -> AbstractContextManager[None]:
        """Return a context manager for one pass over micro-batches, which computes no gradients if `forward_only`.

        It seeds the dropout of LoRA adapters, so that a run that resumes from a checkpoint drops the same elements.
        """
        lora = self.cfg.model.lora
        if lora is None or not lora.dropout:
            return nullcontext()
        place = (self.ranks.data_rank, self.stage_number, int(forward_only))
        return dropout_drawn_from(self.cfg.algorithm.seed, self.counts.attempted, *place)

    # Set-up ---------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        # The template has the names, shapes and ties of the transformers model. It has no storage.
        self.template = hf.build_model(self._hf_config, dtype=self.dtype)
        aliases = hf.tied_names(self.template)
        self.sync_names = [(name, aliases.get(name)) for name in hf.stored_names(self.template, {})]
        if (adapters := self.cfg.model.lora) is not None:
            lora.attach_adapters(self.template, adapters)
        with self.device_context():
            self._make_groups()
            tensor = self.parallel.tensor
            self.cut = TensorParallelLayout.of(self.template.config, rank=self.ranks.rank % tensor, ranks=tensor)
            self._build(self._hf_config["architectures"][0], aliases)
            self.optimizer = build_optimizer(
                self.cfg.actor, self.stages, dtype=self.dtype, distributed=self._distributed
            )
            trained = {name: parameter for name, parameter in self._parameters().items() if parameter.requires_grad}
            self._shards = open_shards(self.optimizer, trained)
            self._set_rates()
            if self.cfg.model.lora is not None:
                lora.initialize(self.master_slices(), self.cfg.algorithm.seed)
                self._copy_masters()

    @property
    def model_config(self) -> Any:
        """The transformers configuration of the model."""
        return self.template.config

    def _parameter_tensors(self) -> list[Tensor]:
        return [parameter.detach() for name, parameter in self._parameters().items() if not is_critic_name(name)]

    def _make_groups(self) -> None:
        state = library.parallel_state
        if state.model_parallel_is_initialized():  # by an earlier actor of this process
            earlier = state._global_process_group_list[1:]
            # megatron only drops its references to these groups, each of which has threads that poll.
            for group in earlier:
                dist.destroy_process_group(group)
            state.destroy_model_parallel()
        with self.ranks.making_groups():
            state.initialize_model_parallel(
                tensor_model_parallel_size=self.parallel.tensor,
                pipeline_model_parallel_size=self.parallel.pipeline,
                virtual_pipeline_model_parallel_size=self.parallel.virtual_pipeline,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=self.cfg.runtime.deadlines.wait_ready / 60,
            )
        # Nothing draws from these generators (no dropout, weights are read); recomputing activations asks for them.
        library.model_parallel_cuda_manual_seed(self.cfg.algorithm.seed)

    def _build(self, architecture: str, aliases: Mapping[str, str]) -> None:
        hf_config = self.template.config
        self._rotary_frequencies, factor = rotary_embedding(self.template)
        self.config = transformer_config(
            hf_config, architecture=architecture, dtype=self.dtype, rotary_factor=factor, **self._settings()
        )
        models = [self._build_stage(hf_config, number) for number in self._virtual_stages()]
        self._fill(models, aliases)
        wrapping = library.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self._distributed
        )
        self.stages = [
            library.DistributedDataParallel(self.config, wrapping, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
        self.config.finalize_model_grads_func = library.finalize_model_grads

    def _settings(self) -> dict[str, Any]:
        """Return the settings of megatron's configuration that depend on the parallel layout and the device."""
        parallel = self.parallel
        settings: dict[str, Any] = {
            "tensor_model_parallel_size": parallel.tensor,
            "pipeline_model_parallel_size": parallel.pipeline,
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
            "sequence_parallel": parallel.sequence,
            # Without it, interleaved stages compute wrong gradients and megatron raises no error.
            "overlap_p2p_comm": parallel.virtual_pipeline is not None,
            "batch_p2p_comm": parallel.virtual_pipeline is None,
        }
        if self.compute_device.type == "cpu":
            settings |= cpu.SETTINGS
        if self.cfg.actor.gradient_checkpointing:
            settings |= _RECOMPUTED[self.cfg.actor.gradient_checkpointing_mode]
        return settings

    def _virtual_stages(self) -> list[int | None]:
        """Return megatron's `vp_stage` of each model chunk of this rank, from 0 on every rank; [None] without virtual stages."""
        num_chunks = self.parallel.virtual_pipeline
        return [None] if num_chunks is None else list(range(num_chunks))

    def _build_stage(self, hf_config: Any, number: int | None) -> Any:
        state, place = library.parallel_state, {"ignore_virtual": number is None, "vp_stage": number}
        model = build_model(
            hf_config,
            self.config,
            vocabulary=self.cut.padded_vocabulary,
            rotary_frequencies=self._rotary_frequencies,
            critic=self.cfg.algorithm.critic_of_actor,
            pre_process=state.is_pipeline_first_stage(**place),
            post_process=state.is_pipeline_last_stage(**place),
            vp_stage=number,
        )
        if (adapters := self.cfg.model.lora) is not None:
            attach_adapters(model, adapters, self.cut)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._is_trained(name))
        return model.to(device=self.compute_device, dtype=self.dtype)

    def _fill(self, models: Iterable[Any], aliases: Mapping[str, str]) -> None:
        """Read this rank's boxes of the model folder; a critic's decoder starts as the policy's."""
        places: dict[str, list[LocalSlice]] = {}
        for model in models:
            for name, parameter in global_parameters(model).items():
                # megatron sets these marks only when it initializes weights itself. The gradient norm and clipping depend on them.
                library.mark_as_cut(parameter, self.cut.mappings(name, parameter.shape)[0].cut_along)
                for stored_name, boxes in self.cut.boxes(name, parameter.shape, parameter).items():
                    places.setdefault(stored_name, []).extend(boxes)
        for name, stored, where in hf.stored_readers(
            hf.named_tensors(self.template), self.template, self.cfg.model.path, aliases
        ):
            for box in (*places.get(name, ()), *places.get(f"{SEPARATE}.{name}", ())):
                hf.fill(box, stored, where)

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """
        rates = self.cfg.actor.optimizer.model_copy(update={"learning_rate": learning_rate})
        self._schedule = LRSchedule.from_spec(rates, total=self._scheduled_steps(steps))
        self._rates = rates
        self._set_rates()

    # Steps ----------------------------------------------------------------------------------------------------------

    def _models(self) -> list[list[Tensor]]:
        """Return the updated tensors of each model that is clipped by its own norm: the policy, and a critic with a decoder of its own."""
        shards, critic = self._shards.items(), self.cfg.algorithm.critic_of_actor
        if critic is None or not critic.separate:
            return [[shard.values for _, shard in shards]]
        return [
            [shard.values for name, shard in shards if is_critic_name(name) is is_critic] for is_critic in (False, True)
        ]

    def _gradient_norm(self) -> float:
        with self.device_context():
            self.optimizer.prepare_grads()
            trains = self._training()
            for name, shard in self._shards.items():
                if name not in trains:
                    shard.values.grad = None  # AdamW skips tensors without a gradient
            self._norms = [gradient_norm(self.optimizer, values) for values in self._models()]
        return math.hypot(*self._norms)

    def _apply_gradients(self, norm: float) -> None:
        clip = self.cfg.actor.grad_clip
        with self.device_context():
            for values, model_norm in zip(self._models(), self._norms, strict=True) if clip is not None else ():
                library.clip_grad_by_total_norm_fp32(values, max_norm=clip, total_norm=model_norm)
            self.optimizer.step_with_ready_grads()

    def _follow_schedule(self) -> None:
        if self.counts.applied == self.cfg.actor.critic_warmup_steps:
            # From here on all parameters are trained, with moments and step counters of zero.
            for shard in self._shards.values():
                for state in shard.state.values():
                    state.zero_()
        self._set_rates()

    def _set_rates(self) -> None:
        factor = self._schedule(self._applied_in_phase) / self._schedule.peak
        for group in self.optimizer.param_groups:
            critic = CRITIC in group
            frozen = self._warming_up and not critic
            group["lr"] = 0.0 if frozen else factor * peak_rate(self._rates, critic=critic)

    def drop_gradients(self) -> None:
        """Discard the gradients. Not collective."""
        if self.has_gradients():
            for stage in self.stages:
                stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    # OffloadManager ------------------------------------------------------------------------------------------------------

    def weight_tensors(self) -> Iterable[Tensor]:
        """Return the parameters and buffers that this rank stores. Not collective."""
        return [tensor for stage in self.stages for tensor in (*stage.module.parameters(), *stage.module.buffers())]

    def moment_tensors(self) -> list[Tensor]:
        """Return the optimizer state that this rank stores, without the step counters. Not collective."""
        # In float32 the optimizer updates the weights themselves, which `weight_tensors` returns.
        weights = {tensor.untyped_storage()._cdata for tensor in self.weight_tensors()}
        values = [shard.values for shard in self._shards.values()]
        copies = [tensor for tensor in values if tensor.untyped_storage()._cdata not in weights]
        return copies + [shard.state[moment] for shard in self._shards.values() for moment in MOMENTS]

    def _grad_buffers(self) -> list[Tensor]:
        return [buffer.grad_data for stage in self.stages for buffer in stage.buffers]

    def has_gradients(self) -> bool:
        """Return whether memory for gradients is allocated. Not collective."""
        return any(buffer.untyped_storage().nbytes() for buffer in self._grad_buffers())

    def has_pending_gradients(self) -> bool:
        """Return whether there are gradients that no optimizer step has applied. Not collective."""
        return self.has_gradients() and any(bool(buffer.count_nonzero()) for buffer in self._grad_buffers())

    def release_gradients(self) -> None:
        """Free the memory of the gradients. Not collective."""
        self.optimizer.zero_grad()
        for buffer in self._grad_buffers():
            buffer.untyped_storage().resize_(0)

    def allocate_gradients(self) -> None:
        """Allocate gradients that are all zero. Not collective."""
        for buffer in self._grad_buffers():
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()

    # State ----------------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Any]:
        """Return this rank's parameters by megatron's name, layers counted over the whole model."""
        return {name: parameter for stage in self.stages for name, parameter in global_parameters(stage.module).items()}

    def _training(self) -> dict[str, OptimizerShard]:
        """Return the shards that take optimizer steps: those of the critic alone in its warm-up."""
        return {name: shard for name, shard in self._shards.items() if is_critic_name(name) or not self._warming_up}

    def named_slices(self) -> Slices:
        """Return the parts of the weights that this rank stores, by Hugging Face name. Not collective."""
        return {
            stored_name: boxes
            for name, parameter in self._parameters().items()
            for stored_name, boxes in self.cut.boxes(name, parameter.shape, parameter).items()
        }

    def master_slices(self) -> Slices:
        """Return the parts of the weights that this rank updates, by Hugging Face name. Not collective."""
        return self._boxes(self._shards, lambda shard: shard.values)

    def moment_slices(self) -> Slices:
        """Return the parts of the optimizer's moments that this rank stores. Not collective."""
        return {
            f"{name}.{moment}": parts
            for moment in MOMENTS
            for name, parts in self._boxes(self._training(), partial(_moment, moment)).items()
        }

    def _boxes(self, shards: Mapping[str, OptimizerShard], tensor_of: Callable[[OptimizerShard], Tensor]) -> Slices:
        """Return the boxes of the tensor that `tensor_of` returns for each of the `shards`, by Hugging Face name."""
        parameters = self._parameters()
        return {
            stored_name: boxes
            for name, shard in shards.items()
            for stored_name, boxes in self.cut.boxes(
                name, parameters[name].shape, tensor_of(shard), shard.start
            ).items()
        }

    def _written(self, slices: Slices, *, updated: bool = True) -> Slices:
        # With the distributed optimizer only this data rank has the elements that it updates. Every data rank has the model's weights.
        if self.ranks.data_rank and not (self._distributed and updated):
            return {}
        return {name: parts for name, parts in slices.items() if self._is_writer(name, parts[0])}

    def _is_writer(self, name: str, part: LocalSlice) -> bool:
        """Return whether this rank, among those of its data rank, writes its `part` of the tensor `name` to a checkpoint.

        Tensor rank 0 writes what all tensor ranks store whole. The first pipeline stage writes embeddings that are tied.
        """
        copied = EMBEDDING if self.cut.tied and self.stage_number else None  # the first stage writes it
        return (self.cut.rank == 0 or not part.replicated) and not (copied and name.startswith(copied))

    @property
    def stage_number(self) -> int:
        """Return the pipeline stage of this rank."""
        return self.ranks.rank // (self.parallel.tensor * self.ranks.data_size)

    def _step_counters(self) -> dict[str, float]:
        parameters = self._parameters()
        counters = {
            mapping.name: float(shard.state["step"])
            for name, shard in self._training().items()
            for mapping in self.cut.mappings(name, parameters[name].shape)
        }
        # Rank 0 writes the counters of all stages, and has only its own.
        return {name: step for steps in self.ranks.gather(counters) for name, step in steps.items()}

    def _resume(self, weights: Slices, moments: Slices, steps: Mapping[str, float]) -> None:
        parameters = self._parameters()
        with self.device_context():
            # The slices share memory with the master weights and the moments, which are loaded already. The model's weights are not.
            self._copy_masters()
            for name, shard in self._training().items():
                shard.state["step"].fill_(steps[self.cut.mappings(name, parameters[name].shape)[0].name])
        self._set_rates()

    def _copy_masters(self) -> None:
        """Copy the master weights, which the optimizer updates, to the weights with which the model computes."""
        parameters = self._parameters()
        for name, shard in self._shards.items():
            flat = parameters[name].detach().view(-1)
            flat[shard.start : shard.start + shard.values.numel()].copy_(shard.values.detach().view(-1))
        if self._distributed:
            for stage in self.stages:
                stage.start_param_sync(force_sync=True)  # each data rank has its own range

    def _whole_shapes(self) -> dict[str, WholeTensor]:
        stored = hf.named_tensors(self.template).items()
        return {name: WholeTensor(tuple(tensor.shape), tensor) for name, tensor in stored}

    def _published_slices(self) -> Slices:
        # Adapters are published from the float32 master weights.
        updated = self.master_slices() if self.cfg.model.lora is not None else {}
        return {**self.named_slices(), **{name: parts for name, parts in updated.items() if is_adapter_name(name)}}

    def _layers_with_adapters(self) -> nn.Module:
        return nn.ModuleList(stage.module for stage in self.stages)


def _moment(name: str, shard: OptimizerShard) -> Tensor:
    return shard.state[name]
