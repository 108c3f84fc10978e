"""How a rollout worker makes the record of a prompt group, whatever its engine: settings, manager, environment, content check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.api.records import EnvironmentInterface, PromptGroupRecord
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.rollouts.engine import Engine
from rl_core.rollouts.generation import GenerationConfig
from rl_core.rollouts.manager import RolloutManager
from rl_core.rollouts.padding import generated

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

PROBE_SEED = 20260101


class GroupMaker:
    """Runs groups through one manager per kind: training, and validation by temperature."""

    def __init__(
        self, spec: RLJobSpec, tokenizer: Tokenizer, engine: Engine, environment: EnvironmentInterface
    ) -> None:
        """Raises RolloutConfigError for sampling settings that the engine does not honour."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._engine = engine
        self._environment = environment
        self._training = engine.generation(generation_config(spec, tokenizer))
        self._managers: dict[tuple[float | None, int], RolloutManager] = {}

    async def make(self, lease: PromptLease) -> PromptGroupRecord:
        """Return the record of a leased group, after the retries that are the worker's."""
        sample = {**lease.sample, "group_id": lease.group_id, "attempt": lease.attempt}
        sample["task_name"] = self._spec.env.type
        return await self._manager(lease.temperature, lease.num_generations).run(sample)

    def metrics(self) -> dict[str, float]:
        """Return `rollout/redispatch_total`: how often a group was begun again here, whatever failed it. From any thread."""
        name = "rollout/redispatch_total"
        return {name: float(sum(manager.metrics()[name] for manager in list(self._managers.values())))}

    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return a continuation of `prompt_ids` drawn with the training settings and a fixed seed.

        Drawn, not greedy, so that its log-probabilities are of the temperature that the trainer scores with.
        """
        data = {
            "input_ids": torch.tensor([prompt_ids], dtype=torch.int64),
            "input_lengths": torch.tensor([len(prompt_ids)]),
            "seeds": [PROBE_SEED],
            "max_new_tokens": [max_new_tokens],
        }
        async for _, row in self._training.generate_async(data):
            ids, logprobs = generated(row, len(prompt_ids))
        return ProbeAnswer(
            ids=tuple(ids.tolist()), logprobs=tuple(logprobs.tolist()), version=self._engine.policy_version
        )

    def _manager(self, temperature: float | None, num_generations: int) -> RolloutManager:
        """Return the manager for groups of this kind, made at first use; `temperature` None = training, 0 = greedy."""
        kind = (temperature, num_generations)
        if kind not in self._managers:
            spec, generation = self._spec, self._training
            if temperature is not None:
                config = generation_config(spec, self._tokenizer, validation_temperature=temperature)
                generation = self._engine.generation(config, validation=True)
            self._managers[kind] = RolloutManager(
                self._tokenizer,
                {spec.env.type: self._environment},
                num_generations,
                self._engine.max_seq_len,
                spec.env.max_turns,
                generation,
                group_seconds=spec.runtime.deadlines.rollout,
                seed=spec.algorithm.seed,
                env_step_seconds=spec.runtime.deadlines.env_step,
            )
        return self._managers[kind]


def generation_config(
    spec: RLJobSpec, tokenizer: Tokenizer, *, validation_temperature: float | None = None
) -> GenerationConfig:
    """Return the job's sampling settings as a backend takes them; of the val_ settings only the temperature is set."""
    sampling = spec.rollout.sampling
    config: GenerationConfig = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_strings": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "_pad_token_id": tokenizer.pad_token_id,
    }
    if validation_temperature is not None:
        config["val_temperature"] = validation_temperature
    return config
