"""`AsyncRolloutImpl`: runs one prompt group in turns of policy and environment; called by the manager.

One sample: prompt -> generate -> environment step -> observation -> generate ... until the environment ends the episode, a limit cuts a
generation, or all turns are used. All samples of a group run concurrently; the first failure cancels the others.

Invariants: generated ids are stored as they were sampled and are never tokenized again; samples share no mutable state; a failure is raised
and never becomes a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import (
    DeadlineExceeded,
    GenerationUnavailable,
    RolloutConfigError,
    RolloutDataFailure,
    text_of,
)
from rl_core.api.records import Completion, EnvironmentReturn, FinishReason, GroupTimes, PromptGroupRecord
from rl_core.data.tokenizer import head_of
from rl_core.observability.statistics import add_counts, percentile, prefixed, summarize
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.episode import Episode, group_name
from rl_core.rollouts.failed_sample import attach_sample
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.message_log import as_token_tensor
from rl_core.rollouts.padded import GenerationInterface, row_generator
from rl_core.rollouts.request_batcher import RowGroup
from rl_core.rollouts.retry import FailureKind, classify_failure, deadline
from rl_core.rollouts.rows import GenerationOutput
from rl_core.rollouts.sampling import sample_seed
from rl_core.rollouts.scoring import calculate_rewards, one_reward

__all__ = ["AsyncRolloutImpl", "calculate_rewards", "percentile", "summarize"]

TIMERS = "timing/rollout"


class AsyncRolloutImpl:
    """Runs prompt groups with a policy and text environments."""

    def __init__(
        self,
        tokenizer: Any,
        task_to_env: Mapping[Any, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        policy_generation: RowGenerator | GenerationInterface,
        max_rollout_turns: int = 999999,
        *,
        seed: int = 0,
        env_step_seconds: float = 120.0,
        greedy: bool = False,
        chat_template: ChatTemplate | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a runner of prompt groups.

        Args:
            tokenizer: Encodes observations and decodes generations; see `manager.TokenizerType`.
            task_to_env: Environment of every task name.
            num_generations_per_prompt: Samples per group.
            max_seq_len: Longest sequence of prompt and all turns, tokens.
            policy_generation: Generates the assistant turns: rows, or padded tensors (`GenerationInterface`).
            max_rollout_turns: Most turns of a sample.
            seed: `algorithm.seed`, from which the seed of every sample is derived.
            env_step_seconds: Deadline of one environment step.
            greedy: Whether to take the most likely token at every position.
            chat_template: Renders what an environment says to a sample with `chat`; None: its text is taken as it is.
            **kwargs: Refused; here so that the error names them.

        Raises RolloutConfigError for max_rollout_turns < 1 and for unknown keywords.
        """
        if max_rollout_turns < 1:
            raise RolloutConfigError(f"max_rollout_turns must be >= 1, got {max_rollout_turns}; raise it")
        if kwargs:
            raise RolloutConfigError(f"AsyncRolloutImpl does not know {', '.join(sorted(kwargs))}; remove them")
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.num_generations_per_prompt = num_generations_per_prompt
        self.max_seq_len = max_seq_len
        self.policy_generation = policy_generation
        self._generator = row_generator(policy_generation)
        self.max_rollout_turns = max_rollout_turns
        self.seed = seed
        self.env_step_seconds = env_step_seconds
        self.greedy = greedy
        self.chat_template = chat_template

    @property
    def policy_version(self) -> int:
        """Version of the policy's weights; 0 (initial weights) for a backend without versions."""
        return self._generator.policy_version

    async def run_rollout(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Return the group of `input_sample`; raises the first failure of a sample after all others have ended."""
        started = time.perf_counter()
        start_version = self.policy_version
        results = await self._gather(input_sample)
        samples_done = time.perf_counter()
        completions = [completion for completion, _ in results]
        times = GroupTimes(samples=[metrics.get("times", []) for _, metrics in results])
        metrics = self._aggregate_rollout_metrics(completions, [metrics for _, metrics in results])
        end = time.perf_counter()
        metrics[f"{TIMERS}/total"] = end - started
        metrics[f"{TIMERS}/run_rollouts"] = samples_done - started
        metrics[f"{TIMERS}/aggregate_metrics"] = end - samples_done
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=input_sample["message_log"],
            extra_env_info=input_sample.get("extra_env_info"),
            metadata={"task_name": input_sample.get("task_name")},
            completions=completions,
            rollout_metrics=metrics,
            group_id=group_name(input_sample),
            attempt=input_sample.get("attempt", 1),
            start_version=start_version,
            end_version=self.policy_version,
            times=times,
        )

    async def _gather(self, input_sample: Mapping[str, Any]) -> list[tuple[Completion, dict[str, Any]]]:
        tasks = [
            asyncio.ensure_future(self._run_samples(input_sample, index))
            for index in range(self.num_generations_per_prompt)
        ]
        try:
            return [sample for samples in await asyncio.gather(*tasks) for sample in samples]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _run_samples(
        self, input_sample: Mapping[str, Any], traj_idx: int
    ) -> list[tuple[Completion, dict[str, Any]]]:
        """Return the samples of episode `traj_idx` and their metrics: one, unless a subclass makes several of an episode."""
        return [await self._run_single_rollout(input_sample, traj_idx)]

    async def _run_single_rollout(
        self, input_sample: Mapping[str, Any], traj_idx: int
    ) -> tuple[Completion, dict[str, Any]]:
        """Return sample `traj_idx` of the group and its metrics.

        Raises GenerationUnavailable or RolloutDataFailure with prompt_idx and traj_idx if generation fails, RolloutTimeout for an
        environment step beyond its deadline, and the environment's own errors unchanged.
        """
        group_id, attempt = group_name(input_sample), input_sample.get("attempt", 1)
        seed = sample_seed(self.seed, group_id, traj_idx, attempt)
        repeatable = self._generator.honours_seeds
        episode = Episode(input_sample, seed=seed if repeatable else None, key=f"{group_id}_g{traj_idx}")
        # Only the first turns of a group start together, so only they can form one engine batch.
        group: RowGroup | None = (f"{group_id}#{attempt}", self.num_generations_per_prompt)
        try:
            for _ in range(self.max_rollout_turns):
                await self._turn(episode, traj_idx, seed, group)
                if episode.over:
                    break
                group = None
            else:
                episode.max_turns_reached = True
        except Exception as error:
            attach_sample(error, traj_idx, episode.log)
            raise
        finally:
            self._release(episode)
        return episode.completion(default_version=self.policy_version), episode.metrics()

    async def _turn(self, episode: Episode, traj_idx: int, seed: int, group: RowGroup | None) -> None:
        location = f"prompt_idx={episode.prompt_idx} traj_idx={traj_idx}"
        try:
            response = await self._generate_response(episode.log, episode.stop_strings, seed=seed, group=group)
        except Exception as error:
            raise _generation_failure(error, location) from error
        assistant, lengths, generated = response
        input_length = int(lengths[0])
        episode.add_response(assistant, input_length, generated)
        episode.mark()
        env_return = await self._env_step(episode)
        episode.mark()
        episode.reward_components, reward = one_reward(env_return.rewards, self._env(episode), location)
        episode.add_reward(reward)
        num_free = self.max_seq_len - input_length - len(assistant["token_ids"])
        observation, terminated = env_return.observations[0], bool(env_return.terminateds[0])
        ids = self._observation_ids(episode, observation, num_free, ends=terminated or episode.truncated)
        episode.add_observation(observation, ids, num_free, terminated=terminated)
        episode.advance(env_return.metadata[0], env_return.next_stop_strings)

    async def _generate_response(
        self,
        message_log: Sequence[Mapping[str, Any]],
        stop_strings: list[str] | None,
        *,
        seed: int = 0,
        group: RowGroup | None = None,
    ) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
        """Return (assistant message, input lengths [1] int32, generation metrics) for the turn that follows `message_log`.

        The message has `token_ids` [n] int64, `generation_logprobs` [n] float32 and `policy_versions`. `group` names the rows that
        start together; see `RowGenerator.generate_row`. Raises RolloutDataFailure for a log of max_seq_len or more tokens.
        """
        prompt = [token for message in message_log for token in as_token_tensor(message["token_ids"]).tolist()]
        if len(prompt) >= self.max_seq_len:
            raise RolloutDataFailure(
                f"prompt must be shorter than max_seq_len {self.max_seq_len}, got {len(prompt)} tokens; drop it at reading"
            )
        output = await self._generator.generate_row(
            prompt, seed=seed, stop_strings=stop_strings, greedy=self.greedy, group=group
        )
        metrics = {
            "gen_leader_worker_idx": output.worker,
            "gen_tokens": len(output.ids),
            "truncated": FinishReason(output.finish_reason).truncated,
            "finish_reason": output.finish_reason,
        }
        return self._assistant(output), torch.tensor([len(prompt)], dtype=torch.int32), metrics

    def _assistant(self, output: GenerationOutput) -> dict[str, Any]:
        """Return the assistant message of `output`. Raises RolloutDataFailure unless logprobs are finite and versions cover all ids."""
        logprobs = torch.tensor(output.logprobs, dtype=torch.float32)
        if not math.isfinite(float(logprobs.sum())):
            raise RolloutDataFailure(f"log-probabilities must be finite, got {output.logprobs[:8]} ...")
        borders = [0, *(end for _, end, _ in output.versions)]
        if [start for start, _, _ in output.versions] != borders[:-1] or borders[-1] != len(output.ids):
            raise RolloutDataFailure(
                f"policy_versions must cover the {len(output.ids)} generated tokens without a gap, got {output.versions}; this is a bug of "
                "the backend"
            )
        return {
            "role": "assistant",
            "content": self.tokenizer.decode(output.ids, skip_special_tokens=True),
            "token_ids": torch.tensor(output.ids, dtype=torch.int64),
            "generation_logprobs": logprobs,
            "policy_versions": [tuple(part) for part in output.versions],
        }

    async def _env_step(self, episode: Episode) -> EnvironmentReturn:
        batch = {
            "message_log": [episode.log],
            "extra_env_info": [episode.env_info],
            "task_name": [episode.task_name],
            "sample_key": [episode.key],
        }
        # `step_limit_seconds` of a RemoteEnvironment is longer than any step, so that the env worker's own error arrives first: it says
        # whether the environment was late or the worker is missing.
        limit = max(self.env_step_seconds, getattr(self._env(episode), "step_limit_seconds", 0.0))
        async with deadline(limit, f"environment step of sample {episode.key}"):
            result = calculate_rewards(batch, self.task_to_env)
            return await result if inspect.isawaitable(result) else result

    def _env(self, episode: Episode) -> Any:
        return self.task_to_env.get(episode.task_name)

    def _release(self, episode: Episode) -> None:
        release = getattr(self._env(episode), "release", None)
        if release is not None:
            release(episode.key)

    def _observation_ids(
        self, episode: Episode, observation: Mapping[str, str], num_free: int, *, ends: bool
    ) -> Tensor:
        """Return the token ids [n] int64 of an observation. There may be more than `num_free` of them; the caller cuts the rest off.

        In a conversation that goes on, an observation is a message. Its tokens are all that the chat template writes between the model's last
        message and its next one. The text alone is tokenized if the role is `environment`, if the sample is not a conversation, if there is
        no chat template, or if the episode is over (`ends`). The result is empty if `num_free` is not positive. Of a very long text only a
        beginning is tokenized, which has more than `num_free` tokens.

        Raises RolloutConfigError if the chat template does not render the message.
        """
        if num_free <= 0:
            return torch.zeros(0, dtype=torch.int64)
        text, role = head_of(observation["content"], self.tokenizer, num_free), observation["role"]
        if self.chat_template is not None and episode.is_chat and role != "environment" and not ends:
            return self._message_ids(self.chat_template, episode, {"role": role, "content": text})
        if not text:
            return torch.zeros(0, dtype=torch.int64)
        encoded = self.tokenizer(text, add_special_tokens=False)
        return as_token_tensor(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded.input_ids)

    def _message_ids(self, template: ChatTemplate, episode: Episode, message: Mapping[str, str]) -> Tensor:
        """Return the token ids [n] int64 between the model's last message and its next one, with `message` in between."""
        history = [{"role": logged["role"], "content": logged["content"]} for logged in episode.log]
        sampled = episode.log[-1]["token_ids"].tolist()
        ids = template.after([*history, message], len(history), sampled[-1] if sampled else -1, {})
        if ids is None:
            raise RolloutConfigError(
                f"the chat template must render an observation with the role {message['role']} after the model's message, and does not; "
                "return another role (`environment`: the text as it is), or correct data.chatTemplate"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def _aggregate_rollout_metrics(
        self, completions: Sequence[Completion], all_sample_metrics: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the group's metrics by name; masked samples (reward NaN) do not count in those of rewards."""
        rows, n = all_sample_metrics, max(len(all_sample_metrics), 1)

        def column(key: str) -> list[Any]:
            return [row[key] for row in rows]

        scored = [completion for completion in completions if not math.isnan(completion.reward)]
        generated = column("assistant_tokens")
        longest = [max(row["turn_gen_tokens"], default=0) for row in rows]
        metrics = prefixed("total_reward", [completion.reward for completion in scored])
        components = {name for completion in scored for name in completion.metrics if name.startswith("reward/")}
        for name in sorted(components):
            metrics |= prefixed(name, [completion.metrics[name] for completion in scored if name in completion.metrics])
        metrics |= prefixed("turns_per_sample", column("turn_count"), percentiles=(95, 99))
        metrics["total_turns"] = sum(column("turn_count"))
        metrics |= prefixed("total_tokens_per_sample", [row["assistant_tokens"] + row["env_tokens"] for row in rows])
        metrics |= prefixed("gen_tokens_per_sample", generated)
        metrics |= prefixed("env_tokens_per_sample", column("env_tokens"))
        metrics["env_seconds_per_sample/mean"] = sum(row.get("env_seconds", 0.0) for row in rows) / n
        metrics["mean_gen_tokens_per_sample"] = sum(generated) / n
        metrics["max_gen_tokens_per_turn/max"] = max(longest, default=0)
        metrics["max_gen_tokens_per_turn/mean"] = sum(longest) / n
        metrics["max_gen_tokens_per_turn/p95"] = percentile(longest, 95)
        reasons = [completion.finish_reason for completion in completions]
        metrics["truncation_rate"] = sum(c.truncated for c in completions) / n
        metrics["natural_termination_rate"] = reasons.count(FinishReason.TERMINATED.value) / n
        metrics["max_turns_reached_rate"] = sum(column("max_turns_reached")) / n
        for reason in FinishReason:
            metrics[f"finish_reason/{reason.value}_rate"] = reasons.count(reason.value) / n
        metrics["per_worker_token_counts"] = add_counts(column("per_worker_token_counts"))
        for kind in ("gen", "input", "total"):
            metrics[f"histogram/{kind}_tokens_length"] = [count for row in rows for count in row[f"turn_{kind}_tokens"]]
        return metrics


def _generation_failure(error: Exception, location: str) -> Exception:
    """Return the typed failure of a generation, with the sample's place in its text."""
    text = f"generation failed for {location}: {type(error).__name__}: {text_of(error)}"
    if isinstance(error, DeadlineExceeded | RolloutConfigError):
        return type(error)(text)
    if classify_failure(error) is FailureKind.INFRASTRUCTURE:
        return GenerationUnavailable(text)
    return RolloutDataFailure(text)
