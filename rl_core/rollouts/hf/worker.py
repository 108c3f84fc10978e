"""`HFRolloutWorker`: a rollout process with the HF engine. Built from the files of hello; the first sync brings the weights."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import torch

from rl_core.api.errors import ConfigError
from rl_core.api.records import PromptGroupRecord
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.rollouts.base import RolloutWorkerBase
from rl_core.rollouts.environment import RemoteEnvironment
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.generation import HFGeneration
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.hf.models import generation_eos_ids, model_from_files, read_config
from rl_core.rollouts.hf.target import EngineTarget
from rl_core.rollouts.manager import RolloutManager

PROBE_SEED = 20260101
QUEUE_SHARE = 0.5
"""Rows leased beyond the engine's batch, as a share of it, so that freed rows are filled at once."""


class HFRolloutWorker(RolloutWorkerBase):
    """Generates with `HFEngine` and scores with the job's env workers."""

    _loop: EngineLoop | None = None

    def _build(self) -> EngineTarget:
        spec, files = self.spec, self.files
        tokenizer = Tokenizer.from_files(files)
        model = model_from_files(files, dtype=getattr(torch, spec.model.dtype), device=self.device)
        engine = HFEngine(
            model,
            tokenizer,
            max_batch=spec.rollout.max_batch,
            max_seq_len=self._max_seq_len(),
            compile=spec.rollout.compile,
            eos_token_ids=generation_eos_ids(files),
        )
        self._loop = EngineLoop(engine, on_step=lambda rows: self.record_progress("tokens", rows))
        self._tokenizer = tokenizer
        self._generations: dict[float, HFGeneration] = {}
        self._managers: dict[tuple[Any, ...], RolloutManager] = {}
        self._training = self._generation()
        deadlines = spec.runtime.deadlines
        self._environment = RemoteEnvironment(
            self._env_addresses,
            self.keys,
            step_seconds=deadlines.env_step,
            connect=lambda address: self.peer(address, "env"),
            available=self.view_changed,
            waiting=lambda address: self.waiting("environment step", "env"),
        )
        # What was built lives as long as the process: a collection over it takes longer than a decode step.
        gc.freeze()
        return EngineTarget(self._loop, pause=self._pause)

    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return a continuation drawn with the training settings and a fixed seed.

        Drawn, not greedy, so that its log-probabilities are of the temperature that the trainer scores with.
        """
        self._require_serving()
        data = {
            "input_ids": torch.tensor([prompt_ids], dtype=torch.int64),
            "input_lengths": torch.tensor([len(prompt_ids)]),
            "seeds": [PROBE_SEED],
            "max_new_tokens": [max_new_tokens],
        }
        start = len(prompt_ids)
        async for _, row in self._training.generate_async(data):
            ids, logprobs = row["output_ids"][0, start:], row["logprobs"][0, start:]
        return ProbeAnswer(ids=tuple(ids.tolist()), logprobs=tuple(logprobs.tolist()), version=self._policy_version())

    async def close(self) -> None:
        """Stop serving and the engine's thread."""
        await super().close()
        if self._loop is not None:
            self._environment.close()
            await asyncio.to_thread(self._loop.close)

    async def _run(self, lease: PromptLease) -> PromptGroupRecord:
        sample = {**lease.sample, "group_id": lease.group_id, "attempt": lease.attempt}
        sample["task_name"] = self.spec.env.type
        return await self._manager(lease).run(sample)

    def _row_capacity(self) -> int:
        rollout = self.spec.rollout
        if rollout.batching == "perGroup":
            return self.spec.algorithm.group_size + 1
        return rollout.max_batch + int(rollout.max_batch * QUEUE_SHARE)

    def _policy_version(self) -> int:
        return self._require_loop().engine.version

    def _require_loop(self) -> EngineLoop:
        if self._loop is None:
            raise ConfigError("the rollout engine is not built yet; call init_worker first")
        return self._loop

    def _max_seq_len(self) -> int:
        given = self.placement.get("max_seq_len") or self.spec.rollout.max_sequence_length
        return int(given or read_config(self.files)["max_position_embeddings"])

    def _generation(self, validation_temperature: float | None = None) -> HFGeneration:
        """Return the backend for training, or for validation at a temperature (0 = greedy)."""
        sampling = self.spec.rollout.sampling
        validation = validation_temperature is not None
        settings = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "val_temperature": validation_temperature,
            "stop_strings": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "_pad_token_id": self._tokenizer.pad_token_id,
        }
        return HFGeneration(
            self._require_loop(),
            settings,
            validation=validation,
            batches_by_group=self.spec.rollout.batching == "perGroup",
            allow_truncated_sampling=self.spec.algorithm.allow_truncated_sampling,
        )

    def _manager(self, lease: PromptLease) -> RolloutManager:
        """Return the manager for this kind of lease, made at first use."""
        key = (lease.temperature, lease.num_generations)
        if key not in self._managers:
            generation = self._training if lease.temperature is None else self._generation(lease.temperature)
            self._managers[key] = RolloutManager(
                self._tokenizer,
                {self.spec.env.type: self._environment},
                key[1],
                self._require_loop().engine.max_seq_len,
                self.spec.env.max_turns,
                generation,
                group_seconds=self.spec.runtime.deadlines.rollout,
                seed=self.spec.algorithm.seed,
                env_step_seconds=self.spec.runtime.deadlines.env_step,
            )
        return self._managers[key]

    def _env_addresses(self) -> list[str]:
        return [member.address for member in self.members("env") if member.state.constructed]
