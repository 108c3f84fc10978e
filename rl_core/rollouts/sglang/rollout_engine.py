"""`SGLangRolloutEngine`: the SGLang engine as a `rollouts.engine.Engine`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from rl_core.api.errors import ConfigError, InfrastructureError, RLJobError, RolloutConfigError
from rl_core.api.job import RLJobSpec
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.engine import EngineSettings
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf.models import describe_model
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import generation_eos_ids, read_config, token_ids
from rl_core.rollouts.sampling import SamplingParams
from rl_core.rollouts.sglang import cpu, setup
from rl_core.rollouts.sglang.adapters import AdapterTensors
from rl_core.rollouts.sglang.engine import PauseMode, SGLangEngine
from rl_core.rollouts.sglang.residency import SGLangResidency
from rl_core.rollouts.sglang.weight_target import SGLangWeightTarget, WeightBuffer, weight_buffer
from rl_core.weights.adapters import sends_adapters

QUEUE_SHARE = 0.5
"""Rows leased beyond the engine's batch, as a fraction of it, so that free places in the batch are filled at once."""


class SGLangRolloutEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        spec: RLJobSpec,
        engine: SGLangEngine,
        folder: setup.ModelFolder,
        buffer: WeightBuffer,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        device: str,
        ranks: int,
        adapters: AdapterTensors | None,
    ) -> None:
        """Run `engine`, of `ranks` tensor-parallel processes, on `device` with the settings of the job `spec`.

        `folder` and `buffer` are closed with it; `shapes` is name -> (shape, dtype) of the model's tensors. `adapters`: None in a job that
        sends none.
        """
        self.engine = engine
        self._seconds = spec.runtime.deadlines.weight_sync
        # On a CPU, where the model is small and reading it back costs as little as loading it, all tensors each time.
        turns = 1 if device == "cpu" else spec.weights.verify_every
        self.weight_target = SGLangWeightTarget(
            engine,
            buffer,
            shapes,
            self._seconds,
            turns=turns,
            adapter_turns=spec.weights.verify_every,
            ranks=ranks,
            collective_seconds=spec.runtime.deadlines.collective,
            adapters=adapters,
        )
        self._has_adapters = adapters is not None
        self.residency = SGLangResidency(engine, self._seconds)
        self.row_capacity = spec.rollout.max_batch + int(spec.rollout.max_batch * QUEUE_SHARE)
        self.max_seq_len = engine.max_seq_len
        self._folder, self._buffer = folder, buffer
        self._open = True

    @classmethod
    def build(
        cls,
        spec: RLJobSpec,
        files: Mapping[str, bytes],
        device: str,
        max_seq_len: int,
        on_tokens: Callable[[int], Any],
        on_stage: Callable[[str], object],
    ) -> SGLangRolloutEngine:
        """Return the engine, started and with unfilled weights; see `RolloutWorkerBase.build_engine`. Blocks for about a minute."""
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                "rollout.engine sglang needs the package sglang, found none; install rljob[rollout], or an image that has it "
                "(worker_images/README.md), or take rollout.engine hf"
            )
        config = read_config(files)
        if "quantization_config" in config:
            raise RolloutConfigError(
                f"rollout.engine sglang: weights must be floating-point numbers, as the trainer's are, got {config['quantization_config']} in "
                "config.json; take the model that is not quantised"
            )
        shapes, eos_token_ids = describe_model(config, dtype=spec.model.dtype)
        if device == "cpu":
            cpu.require(config)
        lora = spec.model.lora
        adapters = AdapterTensors(lora, shapes) if lora is not None and sends_adapters(spec) else None
        folder, buffer = setup.ModelFolder(files), weight_buffer(shapes, adapters)
        options = setup.options(spec, folder.path, device, max_seq_len)
        engine = SGLangEngine(
            EngineSettings(
                options=options, architecture=str(next(iter(config.get("architectures") or ()), "")), owner=folder.owner
            ),
            environ=setup.variables(folder.path, device, shares_device=spec.placement.mode != "disaggregated"),
            memory=buffer.descriptor,
            start_seconds=spec.runtime.deadlines.wait_ready,
            max_seq_len=max_seq_len,
            vocab_size=int(config["vocab_size"]),
            tokenizer=Tokenizer.from_files(files),
            eos_token_ids=_eos_ids(files, eos_token_ids),
            on_tokens=on_tokens,
            silence_seconds=spec.runtime.deadlines.engine_silence,
            # On shared devices the trainer may use the memory by the time the engine is lost. The worker ends instead, and its
            # replacement starts an engine when it has the devices.
            restarts=spec.placement.mode == "disaggregated",
            on_stage=on_stage,
        )
        built = cls(spec, engine, folder, buffer, shapes, device, options.get("tp_size", 1), adapters)
        try:
            engine.start()
        except BaseException:
            built.close()
            raise
        return built

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that new tokens are drawn from."""
        return self.engine.version

    @property
    def weights_proof(self) -> str:
        """How the served weights were verified; see `Engine.weights_proof`."""
        return self.weight_target.proof

    def generator(self, params: SamplingParams) -> EngineGenerator:
        """Return a generator of rows with the sampling settings `params`. SGLang does not repeat samples by seed."""
        return EngineGenerator(self.engine, params, honours_seeds=False)

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause generation; see `Engine.pause`."""
        # Keys and values are of one adapter: rows with adapters are requested again with that of the new version.
        mode: PauseMode = "abort" if self._has_adapters else "in_place" if keep_cache else "retract"
        with suppress(InfrastructureError):  # An engine that is gone generates nothing.
            await self.engine.pause(mode, self._seconds)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Register callbacks for the end of the child process and for its replacement; see `Engine.watch`."""
        self.engine.watch(lost, back)

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        return self.engine.load()

    def close(self) -> None:
        """End the engine's process; idempotent."""
        self.engine.close()
        if self._open:
            self._open = False
            self._buffer.close()
            self._folder.close()


def _eos_ids(files: Mapping[str, bytes], of_model: Iterable[int]) -> set[int]:
    """Return the end-of-sequence ids of tokenizer, configuration and generation settings: the same as with the HF engine."""
    return {*of_model, *generation_eos_ids(files), *token_ids(Tokenizer.from_files(files).eos_token_id)}
