"""`ServedEngine`: the SGLang engine behind the worker's port `rollouts.engine.Engine`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from rl_core.api.errors import ConfigError, InfrastructureError, RLJobError, RolloutConfigError
from rl_core.api.job import RLJobSpec
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.engine import EngineSource
from rl_core.rollouts.generation import GenerationConfig
from rl_core.rollouts.hf.config import DecoderConfig, unsupported
from rl_core.rollouts.hf.weights import DecoderWeights
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import generation_eos_ids, read_config, token_ids
from rl_core.rollouts.sglang import cpu, setup
from rl_core.rollouts.sglang.engine import SGLangEngine
from rl_core.rollouts.sglang.generation import SGLangGeneration
from rl_core.rollouts.sglang.residency import EngineResidency
from rl_core.rollouts.sglang.target import EngineTarget, SharedMemory, memory_for

QUEUE_SHARE = 0.5
"""Rows leased beyond the engine's batch, as a share of it, so that freed rows are filled at once."""


def build(
    spec: RLJobSpec, files: Mapping[str, bytes], device: str, max_seq_len: int, on_step: Callable[[int], Any]
) -> ServedEngine:
    """Return the engine, up and with unfilled weights; see `rollouts.engine.build_engine`. Takes the minute that its start takes."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine sglang needs the package sglang, found none; install rljob[rollout], or an image that has it "
            "(worker_images/README.md), or take rollout.engine hf"
        )
    shapes = _shapes(files, spec.model.dtype)
    if device == "cpu":
        cpu.require(read_config(files))
    folder, memory = setup.ModelFolder(files), memory_for(shapes)
    engine = SGLangEngine(
        EngineSource(
            options=setup.options(spec, folder.path, device, max_seq_len), family=str(read_config(files)["model_type"])
        ),
        environ=setup.variables(folder.path, device),
        memory=memory.descriptor,
        start_seconds=spec.runtime.deadlines.wait_ready,
        max_seq_len=max_seq_len,
        vocab_size=int(read_config(files)["vocab_size"]),
        eos_token_ids=_eos_ids(files),
        on_tokens=on_step,
        patience=spec.runtime.deadlines.rpc,
        # Where devices are shared, the trainer may have them by the time an engine is lost: the next one starts in its turn, as a joiner.
        restarts=spec.placement.mode == "disaggregated",
    )
    served = ServedEngine(spec, engine, Tokenizer.from_files(files), folder, memory, shapes, device)
    try:
        engine.start()
    except BaseException:
        served.close()
        raise
    return served


class ServedEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        spec: RLJobSpec,
        engine: SGLangEngine,
        tokenizer: Tokenizer,
        folder: setup.ModelFolder,
        memory: SharedMemory,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        device: str,
    ) -> None:
        """Serve `engine` on `device` as `spec` says; `folder` and `memory` are closed with it."""
        self.engine = engine
        self.weight_target = EngineTarget(
            engine, memory, shapes, spec.runtime.deadlines.weight_sync, provable=device == "cpu"
        )
        self.residency = EngineResidency(engine, spec.runtime.deadlines.weight_sync)
        self.row_capacity = spec.rollout.max_batch + int(spec.rollout.max_batch * QUEUE_SHARE)
        self.max_seq_len = engine.max_seq_len
        self._seconds = spec.runtime.deadlines.weight_sync
        self._allow_truncated = spec.algorithm.allow_truncated_sampling
        self._tokenizer, self._folder, self._memory = tokenizer, folder, memory
        self._open = True

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that new tokens come from."""
        return self.engine.version

    @property
    def weights_proof(self) -> str:
        """Return what proves the served weights."""
        return self.weight_target.proof

    def generation(self, config: GenerationConfig, *, validation: bool = False) -> SGLangGeneration:
        """Return a backend for `config`; all share the engine's batch."""
        return SGLangGeneration(
            self.engine,
            config,
            tokenizer=self._tokenizer,
            validation=validation,
            allow_truncated_sampling=self._allow_truncated,
        )

    async def hold(self, *, keep_cache: bool) -> None:
        """Interrupt what generates; see `Engine.hold`. Rows go back to the engine's queue with the tokens they have, or stay in its batch."""
        with suppress(InfrastructureError):  # nothing generates in an engine that is gone
            await self.engine.pause("in_place" if keep_cache else "retract", self._seconds)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Tell of the child's end and of its successor."""
        self.engine.watch(lost, back)

    def load(self) -> EngineLoad:
        """Return what the engine has to do."""
        return self.engine.load()

    def close(self) -> None:
        """End the engine's process; idempotent."""
        self.engine.close()
        if self._open:
            self._open = False
            self._memory.close()
            self._folder.close()


def _shapes(files: Mapping[str, bytes], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of the model's tensors. Raises RolloutConfigError for a family whose layout is not known here."""
    raw = read_config(files)
    reason = unsupported(raw)
    if reason is not None:
        raise RolloutConfigError(f"rollout.engine sglang: {reason}; take rollout.engine hf for this model")
    weights = DecoderWeights(DecoderConfig.from_dict(raw), dtype=getattr(torch, dtype), device="meta")
    return {name: (shape, dtype) for name, shape in weights.names_and_shapes().items()}


def _eos_ids(files: Mapping[str, bytes]) -> set[int]:
    """Return what ends a sequence, as with the HF engine: the ids that tokenizer, configuration and generation settings name."""
    own = DecoderConfig.from_dict(read_config(files)).eos_token_ids
    return {*own, *generation_eos_ids(files), *token_ids(Tokenizer.from_files(files).eos_token_id)}
