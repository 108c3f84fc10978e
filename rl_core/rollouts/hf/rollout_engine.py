"""`HFRolloutEngine`: the HF engine as a `rollouts.engine.Engine`, with a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_core.api.errors import RLJobError
from rl_core.api.job import RLJobSpec
from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.adapters import AdapterMerge
from rl_core.rollouts.engine import PROVEN, UNPROVEN
from rl_core.rollouts.generation import EngineGenerator
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.models import model_from_files
from rl_core.rollouts.hf.residency import HFResidency
from rl_core.rollouts.hf.weight_target import HFWeightTarget
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import generation_eos_ids
from rl_core.rollouts.sampling import SamplingParams
from rl_core.weights.adapters import sends_adapters

QUEUE_SHARE = 0.5
"""Rows leased beyond the engine's batch, as a fraction of it, so that free places in the batch are filled at once."""


class HFRolloutEngine:
    """Implements `Engine`."""

    def __init__(self, spec: RLJobSpec, loop: EngineLoop) -> None:
        """Run the engine of `loop` with the settings of the job `spec`."""
        self._by_group = spec.rollout.batching == "perGroup"
        max_batch = spec.rollout.max_batch
        self.row_capacity = (
            spec.algorithm.group_size + 1 if self._by_group else max_batch + int(max_batch * QUEUE_SHARE)
        )
        self.loop = loop
        engine, adapters = loop.engine, None
        if spec.model.lora is not None and sends_adapters(spec):
            adapters = AdapterMerge(spec.model.lora, engine.shapes_and_dtypes(), device=str(engine.device))
        self.weight_target = HFWeightTarget(loop, adapters)
        self.residency = HFResidency(loop, adapters)
        self.weights_proof = PROVEN if loop.engine.destinations() else UNPROVEN
        """On a CPU the receiver takes the checksums of the engine's tensors while it writes them. On other devices it can take those of
        the bytes that it received only."""

    @classmethod
    def build(
        cls,
        spec: RLJobSpec,
        files: Mapping[str, bytes],
        device: str,
        max_seq_len: int,
        on_tokens: Callable[[int], Any],
        on_stage: Callable[[str], object],
    ) -> HFRolloutEngine:
        """Return the engine with unfilled weights; see `RolloutWorkerBase.build_engine`. `on_stage` is not called: it starts no process."""
        engine = HFEngine(
            model_from_files(files, dtype=getattr(torch, spec.model.dtype), device=device),
            Tokenizer.from_files(files),
            max_batch=spec.rollout.max_batch,
            max_seq_len=max_seq_len,
            compile=spec.rollout.compile,
            float32_head=spec.model.float32_head,
            eos_token_ids=generation_eos_ids(files),
        )
        return cls(spec, EngineLoop(engine, on_tokens=on_tokens))

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that new tokens are drawn from."""
        return self.loop.version

    @property
    def max_seq_len(self) -> int:
        """Return the longest sequence of prompt and completion, tokens."""
        return self.loop.engine.max_seq_len

    def generator(self, params: SamplingParams) -> EngineGenerator:
        """Return a generator of rows with the sampling settings `params`."""
        return EngineGenerator(self.loop, params, batches_by_group=self._by_group)

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause generation; see `Engine.pause`."""
        await asyncio.to_thread(self.loop.pause, keep_cache=keep_cache)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Do nothing: this engine ends with the worker's process."""

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        return self.loop.load()

    def close(self) -> None:
        """Stop the engine's thread; idempotent."""
        self.loop.close()
