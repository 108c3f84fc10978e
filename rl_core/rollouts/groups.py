"""`GroupMaker`: generates leased prompt groups, and the answer of the content check, with any engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_core.api.records import EnvironmentInterface, PromptGroupRecord
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.engine import Engine
from rl_core.rollouts.manager import RolloutManager
from rl_core.rollouts.sampling import SamplingParams, unique

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.rollouts.agents import AgentEndpoint

PROBE_SEED = 20260101


class GroupMaker:
    """Generates leased groups, with one RolloutManager for training and one per temperature of validation."""

    def __init__(
        self,
        spec: RLJobSpec,
        tokenizer: Tokenizer,
        engine: Engine,
        environment: EnvironmentInterface,
        template: ChatTemplate,
        agents: AgentEndpoint | None = None,
    ) -> None:
        """Run groups of the job `spec` with `engine` and `environment`.

        `template` renders what the environment says in a conversation; `agents` is for jobs whose episodes agent programs drive.
        """
        self._spec = spec
        self._tokenizer = tokenizer
        self._engine = engine
        self._environment = environment
        self._template = template
        self._agents = agents
        self._params = training_params(spec)
        self._training = engine.generator(self._params)
        self._managers: dict[tuple[float | None, int], RolloutManager] = {}

    async def make(self, lease: PromptLease) -> PromptGroupRecord:
        """Generate a leased group and return its record. Raises the last failure once all attempts are used."""
        sample = {**lease.sample, "group_id": lease.group_id, "attempt": lease.attempt, "resumed": lease.resumed}
        sample["task_name"] = self._spec.env.type
        return await self._manager(lease.temperature, lease.num_generations).run(sample)

    def metrics(self) -> dict[str, float]:
        """Return `rollout/redispatch_total`: attempts at groups that followed a failure. May be called from any thread."""
        name = "rollout/redispatch_total"
        return {name: float(sum(manager.metrics()[name] for manager in list(self._managers.values())))}

    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return a continuation of `prompt_ids`, sampled with the training settings and a fixed seed.

        It is sampled rather than greedy, so that its log-probabilities have the temperature that the trainer scores with.
        """
        output = await self._training.generate_row(prompt_ids, seed=PROBE_SEED, max_new_tokens=max_new_tokens)
        return ProbeAnswer(ids=tuple(output.ids), logprobs=tuple(output.logprobs), version=self._engine.policy_version)

    def _manager(self, temperature: float | None, num_generations: int) -> RolloutManager:
        """Return the manager for groups of this kind, created at first use; `temperature` None = training, 0 = greedy."""
        kind = (temperature, num_generations)
        if kind not in self._managers:
            spec, generation = self._spec, self._training
            if temperature is not None:
                params = replace(self._params.unbiased(), temperature=temperature)
                generation = self._engine.generator(params)
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
                chat_template=self._template,
                **(self._agents.rollout_options(training=temperature is None) if self._agents is not None else {}),
            )
        return self._managers[kind]


def training_params(spec: RLJobSpec) -> SamplingParams:
    """Return the sampling settings of the job's training rollouts."""
    sampling = spec.rollout.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in sampling.logit_bias.items()),
        stop_strings=unique(sampling.stop),
        stop_token_ids=unique(sampling.stop_token_ids),
    )
