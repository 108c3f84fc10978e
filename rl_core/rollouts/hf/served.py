"""`ServedEngine`: the HF engine behind the worker's port `rollouts.engine.Engine`, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import RLJobError
from rl_core.api.job import RLJobSpec
from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.generation import GenerationConfig
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.generation import HFGeneration
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.models import model_from_files
from rl_core.rollouts.hf.residency import EngineResidency
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import generation_eos_ids
from rl_core.weights.host_alias import host_alias

QUEUE_SHARE = 0.5
"""Rows leased beyond the engine's batch, as a share of it, so that freed rows are filled at once."""


def build(
    spec: RLJobSpec, files: Mapping[str, bytes], device: str, max_seq_len: int, on_step: Callable[[int], Any]
) -> ServedEngine:
    """Return the engine with unfilled weights; see `rollouts.engine.build_engine`."""
    engine = HFEngine(
        model_from_files(files, dtype=getattr(torch, spec.model.dtype), device=device),
        Tokenizer.from_files(files),
        max_batch=spec.rollout.max_batch,
        max_seq_len=max_seq_len,
        compile=spec.rollout.compile,
        eos_token_ids=generation_eos_ids(files),
    )
    return ServedEngine(spec, EngineLoop(engine, on_step=on_step))


class ServedEngine:
    """Implements `Engine`."""

    def __init__(self, spec: RLJobSpec, loop: EngineLoop) -> None:
        """Serve the engine of `loop` as `spec` says."""
        self._by_group = spec.rollout.batching == "perGroup"
        self._allow_truncated = spec.algorithm.allow_truncated_sampling
        max_batch = spec.rollout.max_batch
        self.row_capacity = (
            spec.algorithm.group_size + 1 if self._by_group else max_batch + int(max_batch * QUEUE_SHARE)
        )
        self.loop = loop
        self.weight_target = EngineTarget(loop)
        self.residency = EngineResidency(loop)
        self.weights_proof = PROVEN
        """The receiver takes the checksums of the engine's tensors while it writes them."""

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that new tokens come from."""
        return self.loop.engine.version

    @property
    def max_seq_len(self) -> int:
        """Return the longest prompt and completion together, tokens."""
        return self.loop.engine.max_seq_len

    def generation(self, config: GenerationConfig, *, validation: bool = False) -> HFGeneration:
        """Return a backend for `config`; all share the engine's batch."""
        return HFGeneration(
            self.loop,
            config,
            validation=validation,
            batches_by_group=self._by_group,
            allow_truncated_sampling=self._allow_truncated,
        )

    async def hold(self, *, keep_cache: bool) -> None:
        """Interrupt what generates; see `Engine.hold`."""
        await asyncio.to_thread(self.loop.hold, keep_cache=keep_cache)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Do nothing: this engine ends with its process."""

    def load(self) -> EngineLoad:
        """Return what the engine has to do."""
        return self.loop.load()

    def close(self) -> None:
        """Stop the engine's thread; idempotent."""
        self.loop.close()


class EngineTarget:
    """Implements `WeightTarget` and `InPlaceTarget` over an engine that nobody uses meanwhile."""

    def __init__(self, loop: EngineLoop) -> None:
        """Write into the engine of `loop`."""
        self._loop, self._engine = loop, loop.engine

    async def prepare(self, deadline: float) -> None:
        """Do nothing: without rows the engine rests."""

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model."""
        dtypes = self._engine.dtypes()
        return {name: (shape, dtypes[name]) for name, shape in self._engine.names_and_shapes().items()}

    def destinations(self) -> Mapping[str, Tensor]:
        """Return the parameters that may be written in place: on CPU, those stored as they are named; their storages stay resizable."""
        return {name: host_alias(tensor) for name, tensor in self._engine.destinations().items()}

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write every tensor where it belongs; names and shapes were compared with the manifest before."""
        self._engine.write_weights(tensors)

    async def resume(self, version: int, digest: str) -> None:
        """Generate with `version` from now on, also what was interrupted."""
        self._engine.serve(version)
        self._loop.release()
