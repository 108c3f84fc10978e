"""A model, its optimizer and its schedule under megatron-core. No reinforcement learning here."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rl_core.actors import hf
from rl_core.actors.manager import ModelManager, Slices, checked
from rl_core.actors.megatron import cpu, guards, library
from rl_core.actors.megatron.convert import EMBEDDING, Cut, Piece, global_parameters
from rl_core.actors.megatron.model import build_model, transformer_config
from rl_core.actors.megatron.source import MegatronSource, SentParts
from rl_core.actors.ranks import ParallelSizes
from rl_core.actors.schedule import MOMENTS, LRSchedule
from rl_core.actors.slices import LocalSlice
from rl_core.api.job import RLJobSpec
from rl_core.weights.manifest import wire_dtype
from rl_core.weights.version_source import SourceEntry


class MegatronModelManager(ModelManager):
    """One rank's share of a model in training. Methods are collective unless they say otherwise."""

    optimizer: "library.MegatronOptimizer"
    stages: list[Any]
    """The parts of the model on this rank, wrapped for data parallelism, in the model's order."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], world_size: int, rank: int) -> None:
        """Join the ranks. `cfg`: the job's spec, or a mapping that is validated into it.

        Raises ValueError for a rank outside [0, world_size), ConfigError for a setting that this backend does not have.
        """
        cfg = checked(cfg)
        self._hf_config = hf.read_config(cfg.model.path)
        guards.check(cfg, self._hf_config)
        self.parallel = cfg.actor.parallel
        data = world_size // self.parallel.model
        sizes = ParallelSizes(data=data, tensor=self.parallel.tensor, pipeline=self.parallel.pipeline)
        super().__init__(cfg, sizes, rank)
        self._schedule = LRSchedule.from_spec(
            self.cfg.actor.optimizer, total=self._optimizer_steps(self.cfg.algorithm.steps)
        )

    def device_layer(self) -> AbstractContextManager[None]:
        """Return the context in which megatron computes on this rank's device, in the calling thread."""
        return cpu.on_cpu() if self.compute_device.type == "cpu" else nullcontext()

    # Set-up ---------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        # Names, shapes and ties as transformers has them; it holds no memory.
        self.template = hf.build_model(self._hf_config, dtype=self.dtype)
        aliases = hf.tied_names(self.template)
        self.sync_names = [(name, aliases.get(name)) for name in hf.stored_names(self.template)]
        with self.device_layer():
            self._make_groups()
            tensor = self.parallel.tensor
            self.cut = Cut.of(self.template.config, rank=self.ranks.rank % tensor, ranks=tensor)
            self._build(self._hf_config["architectures"][0], aliases)
            self._build_optimizer()
            self._sent_parts = SentParts(self._sent(self._weight_pieces()), self.ranks)

    @property
    def model_config(self) -> Any:
        """Return the configuration that transformers has of the model."""
        return self.template.config

    def _parameter_tensors(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters().values()]

    def _make_groups(self) -> None:
        state = library.parallel_state
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()  # of an earlier actor of this process
        with self.ranks.making_groups():
            state.initialize_model_parallel(
                tensor_model_parallel_size=self.parallel.tensor,
                pipeline_model_parallel_size=self.parallel.pipeline,
                virtual_pipeline_model_parallel_size=self.parallel.virtual_pipeline,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=self.cfg.runtime.deadlines.collective / 60,
            )
        # Nothing draws from these generators (no dropout, weights are read); recomputing activations asks for them.
        library.model_parallel_cuda_manual_seed(self.cfg.algorithm.seed)

    def _build(self, architecture: str, aliases: Mapping[str, str]) -> None:
        hf_config = self.template.config
        self.config = transformer_config(hf_config, architecture=architecture, dtype=self.dtype, **self._settings())
        models = [self._build_stage(hf_config, number) for number in self._stage_numbers()]
        self._fill(models, aliases)
        wrapping = library.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.stages = [
            library.DistributedDataParallel(self.config, wrapping, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
        self.config.finalize_model_grads_func = library.finalize_model_grads

    def _settings(self) -> dict[str, Any]:
        """Return what layout and device ask of megatron's configuration."""
        parallel = self.parallel
        settings: dict[str, Any] = {
            "tensor_model_parallel_size": parallel.tensor,
            "pipeline_model_parallel_size": parallel.pipeline,
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
            "sequence_parallel": parallel.sequence,
            # Interleaved stages without it train on wrong gradients, and megatron does not tell.
            "overlap_p2p_comm": parallel.virtual_pipeline is not None,
            "batch_p2p_comm": parallel.virtual_pipeline is None,
        }
        if self.compute_device.type == "cpu":
            settings |= cpu.SETTINGS
        if self.cfg.actor.gradient_checkpointing:
            settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return settings

    def _stage_numbers(self) -> list[int | None]:
        """Return the numbers of this rank's runs of layers; None where it has one."""
        runs = self.parallel.virtual_pipeline
        return [None] if runs is None else list(range(runs))

    def _build_stage(self, hf_config: Any, number: int | None) -> Any:
        state, place = library.parallel_state, {"ignore_virtual": number is None, "vp_stage": number}
        return build_model(
            hf_config,
            self.config,
            vocabulary=self.cut.padded_vocabulary,
            rotary_frequencies=_rotary_frequencies(self.template),
            pre_process=state.is_pipeline_first_stage(**place),
            post_process=state.is_pipeline_last_stage(**place),
            vp_stage=number,
        ).to(device=self.compute_device, dtype=self.dtype)

    def _fill(self, models: Iterable[Any], aliases: Mapping[str, str]) -> None:
        """Read this rank's pieces of the model folder."""
        places: dict[str, list[Piece]] = {}
        for model in models:
            for name, parameter in global_parameters(model).items():
                pieces = self.cut.pieces(name, parameter)
                # megatron marks them when it draws weights itself; norms and clipping go by the marks.
                library.mark_as_cut(parameter, pieces[0].cut_along)
                for piece in pieces:
                    places.setdefault(piece.name, []).append(piece)
        for name, stored, where in hf.stored_readers(self.template, self.cfg.model.path, aliases):
            for piece in places.get(name, ()):
                box = torch.empty(piece.size, dtype=self.dtype, device=self.compute_device)
                part = LocalSlice(
                    tensor=box, shape=piece.shape, offset=piece.offset, replicated=piece.cut_along is None
                )
                hf.fill(part, stored, where)
                piece.fill(box)

    def _build_optimizer(self) -> None:
        spec = self.cfg.actor.optimizer
        beta1, beta2 = spec.betas
        config = library.OptimizerConfig(
            optimizer="adam",
            lr=spec.learning_rate,
            weight_decay=spec.weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=spec.eps,
            clip_grad=self.cfg.actor.grad_clip or 0.0,
            bf16=self.dtype == torch.bfloat16,
            params_dtype=self.dtype,
        )
        self.optimizer = library.get_megatron_optimizer(config, self.stages, use_gloo_process_groups=False)
        for group in self.optimizer.param_groups:
            # megatron leaves the product to a scheduler of its own, which is not used here.
            group["weight_decay"] = spec.weight_decay * group["wd_mult"]
        for parameter in self._masters().values():
            self._state_of(parameter).update(
                step=torch.zeros((), dtype=torch.float32),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            )
        self._follow_schedule()

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Go on with another peak learning rate and another number of steps of the run, from the next optimizer step on.

        Not collective. Raises ConfigError when the schedule does not fit them.
        """
        optimizer = self.cfg.actor.optimizer.model_copy(update={"learning_rate": learning_rate})
        self._schedule = LRSchedule.from_spec(optimizer, total=self._optimizer_steps(steps))
        self._follow_schedule()

    # Steps ----------------------------------------------------------------------------------------------------------

    def _gradient_norm(self) -> float:
        with self.device_layer():
            self.optimizer.prepare_grads()
            return float(self.optimizer.get_grad_norm())

    def _apply_gradients(self, norm: float) -> None:
        with self.device_layer():
            if self.cfg.actor.grad_clip is not None:
                for optimizer in self.optimizer.chained_optimizers:
                    library.clip_grad_by_total_norm_fp32(
                        optimizer.get_parameters(), max_norm=self.cfg.actor.grad_clip, total_norm=norm
                    )
            self.optimizer.step_with_ready_grads()

    def _follow_schedule(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule(self.counts.applied)

    def drop_gradients(self) -> None:
        """Forget the gradients. Not collective."""
        if not self.is_grad_offloaded:
            for stage in self.stages:
                stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    # Residency ------------------------------------------------------------------------------------------------------

    def _weight_tensors(self) -> Iterable[Tensor]:
        return [tensor for stage in self.stages for tensor in (*stage.module.parameters(), *stage.module.buffers())]

    def _moment_tensors(self) -> list[Tensor]:
        parameters, masters = self._parameters(), self._masters()
        copies = [master for name, master in masters.items() if master is not parameters[name]]
        return copies + [self._state_of(master)[moment] for master in masters.values() for moment in MOMENTS]

    def _grad_buffers(self) -> list[Tensor]:
        return [buffer.grad_data for stage in self.stages for buffer in stage.buffers]

    def _grads_wait(self) -> bool:
        return not self.is_grad_offloaded and any(bool(buffer.count_nonzero()) for buffer in self._grad_buffers())

    def _release_gradients(self) -> None:
        self.optimizer.zero_grad()
        for buffer in self._grad_buffers():
            buffer.untyped_storage().resize_(0)

    def _zero_gradients(self) -> None:
        for buffer in self._grad_buffers():
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()

    # State ----------------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Any]:
        """Return this rank's parameters by megatron's name, layers counted over the whole model."""
        return {name: parameter for stage in self.stages for name, parameter in global_parameters(stage.module).items()}

    def _masters(self) -> dict[str, Tensor]:
        """Return what the optimizer updates: the parameters, in half precision their float32 copies."""
        return {name: getattr(parameter, "main_param", parameter) for name, parameter in self._parameters().items()}

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        (chained,) = self.optimizer.chained_optimizers
        state: dict[str, Tensor] = chained.optimizer.state[master]
        return state

    def _pieces(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        return [piece for name, tensor in tensors.items() for piece in self.cut.pieces(name, tensor)]

    def _weight_pieces(self) -> Slices:
        return {piece.name: piece.slice() for piece in self._pieces(self._parameters())}

    def named_slices(self) -> Slices:
        """Return what this rank updates of the weights by Hugging Face name. Not collective."""
        return {piece.name: piece.slice() for piece in self._pieces(self._masters())}

    def moment_slices(self) -> Slices:
        """Return what this rank stores of the moments. Not collective."""
        return {f"{piece.name}.{moment}": piece.slice() for moment in MOMENTS for piece in self._moment_pieces(moment)}

    def _moment_pieces(self, moment: str) -> list[Piece]:
        return self._pieces({name: self._state_of(master)[moment] for name, master in self._masters().items()})

    def _sent(self, slices: Slices) -> Slices:
        """Return what this rank gives when all ranks put whole tensors together: each element comes from one rank."""
        if self.ranks.data_rank:
            return {}
        copied = EMBEDDING if self.cut.tied and self.stage_number else None  # the first stage gives it
        return {
            name: part
            for name, part in slices.items()
            if (self.cut.rank == 0 or not part.replicated) and not (copied and name.startswith(copied))
        }

    @property
    def stage_number(self) -> int:
        """Return which stage of the pipeline this rank is."""
        return self.ranks.rank // (self.parallel.tensor * self.ranks.data_size)

    def _written(self, slices: Slices) -> Slices:
        return self._sent(slices)

    def _step_counters(self) -> dict[str, float]:
        own = {
            piece.name: float(self._state_of(master)["step"])
            for name, master in self._masters().items()
            for piece in self.cut.pieces(name, master)
        }
        # Rank 0 writes them, and has one stage.
        return {name: step for steps in self.ranks.gather(own) for name, step in steps.items()}

    def _resume(self, weights: Slices, moments: Slices, steps: Mapping[str, float]) -> None:
        masters, parameters = self._masters(), self._parameters()
        with torch.no_grad():
            for piece in self._pieces(masters):
                piece.fill(weights[piece.name].tensor)
            for moment in MOMENTS:
                for piece in self._moment_pieces(moment):
                    piece.fill(moments[f"{piece.name}.{moment}"].tensor)
            for name, parameter in parameters.items():
                if masters[name] is not parameter:
                    parameter.copy_(masters[name])
                self._state_of(masters[name])["step"].fill_(steps[self.cut.pieces(name, parameter)[0].name])
        self._follow_schedule()

    def _whole_tensors(self) -> dict[str, Tensor]:
        source = self._version_source(self.cfg.model.dtype, 1)
        whole: dict[str, Tensor] = {}
        if self.ranks.rank == 0:
            for bucket in source.buckets(str(self.compute_device)):
                for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True):
                    whole[source.entries[index].name] = tensor
            whole |= {entry.name: whole[entry.alias_of] for entry in source.entries if entry.alias_of is not None}
        source.finish()
        return whole

    def _version_source(self, dtype: str, bucket_bytes: int) -> MegatronSource:
        self._require_loaded("gathering the weights")
        shapes = hf.stored_tensors(self.template)
        entries = [
            SourceEntry(name, tuple(shapes[tied or name].shape), wire_dtype(shapes[tied or name], dtype), tied)
            for name, tied in self.sync_names
        ]
        sent = self._sent(self._weight_pieces())
        return MegatronSource(entries, sent, self._sent_parts, self.ranks, bucket_bytes=bucket_bytes)


def _rotary_frequencies(template: Any) -> Tensor:
    """Return [D / 2] the frequencies of a transformers model, its scaling included."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = template.model.rotary_emb
    if rotary.rope_type == "default":
        frequencies, _ = rotary.compute_default_rope_parameters(template.config, device="cpu")
    else:
        frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](template.config, "cpu")
    return frequencies
