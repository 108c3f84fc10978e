"""`AsyncNemoGymRolloutImpl`: runs one prompt group on NeMo-Gym servers; called by the manager.

One row per sample: the agent of the servers calls the model and the tools, and returns the scored episode. Rows without an answer are sent
again under the deadline of the group. Invariant: a row that failed or that its environment excludes never has a reward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.api.errors import GymTransportError, RolloutConfigError, RolloutDataFailure, RolloutTimeout, shown
from rl_core.api.records import Completion, FinishReason, PromptGroupRecord
from rl_core.nemo_gym.answers import ROW_ID, GymProtocolFailure, RowFailure, is_incomplete, is_masked
from rl_core.observability.statistics import percentile, prefixed
from rl_core.rollouts.episode import group_name
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.message_log import as_token_tensor, common_prefix
from rl_core.rollouts.padded import GenerationInterface, row_generator
from rl_core.rollouts.retry import deadline
from rl_core.workers.timers import Timers, worker_timer

TASK = "nemo_gym"
"""Name of the environment that runs the rows."""
TIMERS = "timing/rollout"
UNSUPPORTED = (
    "stop_strings",
    "stop_token_ids",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Generation settings that a request of the Responses API cannot state."""
NAMED_FAILURES = 3
"""Rows without an answer whose reason is part of the error."""


class RolloutTimer(Timers):
    """Sums of seconds by tag, measured by `with timer.time(tag)`."""

    def time(self, tag: str) -> worker_timer:
        """Return a context manager that adds the seconds of its block to the sum of `tag`."""
        return worker_timer(tag, timers=self)


class AsyncNemoGymRolloutImpl:
    """Generates and scores prompt groups with the agents of NeMo-Gym.

    Each sample of a group is sent as one row to the NeMo-Gym servers. Their agent runs the whole episode: it calls the policy through an
    OpenAI-compatible endpoint, runs the tools, and returns the conversation with its reward.
    """

    def __init__(
        self,
        tokenizer: Any,
        task_to_env: Mapping[Any, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        generation_config: Mapping[str, Any],
        max_rollout_turns: int | None = None,
        *,
        mask_env_flagged_samples: bool = True,
        max_gym_row_attempts: int = 3,
        group_seconds: float | None = None,
        policy_generation: RowGenerator | GenerationInterface | None = None,
        weight_version: Callable[[], int | Awaitable[int]] | None = None,
        on_redispatch: Callable[[int], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a runner of prompt groups.

        Args:
            tokenizer: Decodes generations for people to read.
            task_to_env: Has the environment of the name "nemo_gym", such as a `NemoGymEnvironment`.
            num_generations_per_prompt: Samples per group.
            max_seq_len: Longest sequence of prompt and all turns, tokens.
            generation_config: `temperature`, `top_p` and `max_new_tokens`, which every row gets.
            max_rollout_turns: None or 1, because the agents of the servers count turns.
            mask_env_flagged_samples: Whether `mask_sample` of an answer excludes the sample from training.
            max_gym_row_attempts: How often a row is sent, in total, until it is answered.
            group_seconds: Deadline of a group; None = no deadline.
            policy_generation: Generates behind the model server; tells the policy version.
            weight_version: Returns the policy version; None = that of `policy_generation`, or 0 without one.
            on_redispatch: Called with the number of rows that are sent again.
            **kwargs: Refused; here so that the error names them.

        Raises RolloutConfigError for settings that the servers cannot honour and for unknown keywords.
        """
        if kwargs:
            raise RolloutConfigError(f"AsyncNemoGymRolloutImpl does not know {', '.join(sorted(kwargs))}; remove them")
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.num_generations_per_prompt = num_generations_per_prompt
        self.max_seq_len = max_seq_len
        self.generation_config = generation_config
        self.max_rollout_turns = max_rollout_turns
        self.mask_env_flagged_samples = mask_env_flagged_samples
        self.max_gym_row_attempts = max_gym_row_attempts
        self.group_seconds = group_seconds
        self._generator = None if policy_generation is None else row_generator(policy_generation)
        self._weight_version = weight_version
        self._on_redispatch = on_redispatch
        self._validate_init_params()

    @property
    def policy_version(self) -> int:
        """Version of the policy's weights by `policy_generation`; 0 without one."""
        return 0 if self._generator is None else self._generator.policy_version

    async def run_rollout(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Return the group of `input_sample`.

        Raises GymTransportError for rows that stay without an answer, RolloutTimeout for a missed deadline and RolloutDataFailure for an
        answer that cannot be trained on.
        """
        timer = RolloutTimer()
        with timer.time(f"{TIMERS}/total"):
            start_version = await self._version()
            inputs = self._build_inputs(input_sample)
            _name_rows(inputs, input_sample)
            completions, metrics = await self._run_rollouts(inputs, timer, TIMERS)
            end_version = await self._version()
        for completion in completions:
            completion.loss_multiplier *= float(input_sample.get("loss_multiplier", 1.0))
            # The servers do not say which version sampled which token, so each token counts as old as the oldest may be.
            completion.policy_versions = (start_version, end_version)
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=_prompt(input_sample, completions),
            extra_env_info=input_sample.get("extra_env_info"),
            metadata={"task_name": TASK},
            completions=completions,
            rollout_metrics=metrics | timer.pop(),
            group_id=group_name(input_sample),
            attempt=input_sample.get("attempt", 1),
            start_version=start_version,
            end_version=end_version,
        )

    def _validate_init_params(self) -> None:
        """Raise RolloutConfigError for settings that the servers cannot honour."""
        for key in UNSUPPORTED:
            if self.generation_config.get(key):
                raise RolloutConfigError(
                    f"{key} is not supported in the generation config in NeMo-Gym path! "
                    f"Got {self.generation_config[key]!r}; remove it"
                )
        if self.max_rollout_turns not in (None, 1):
            raise RolloutConfigError(
                f"max_rollout_turns must be None or 1 in the NeMo-Gym path, got {self.max_rollout_turns}; "
                "the agents of the servers limit turns"
            )
        if self.max_gym_row_attempts < 1:
            raise RolloutConfigError(
                f"max_gym_row_attempts must be >= 1, got {self.max_gym_row_attempts}; 1 = rows are sent once"
            )

    def _build_inputs(self, input_sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample: `extra_env_info` with `_rowidx` and the sampling settings in `responses_create_params`.

        Raises RolloutDataFailure for a sample that is no row of NeMo-Gym, and RolloutConfigError for a missing setting.
        """
        row = input_sample.get("extra_env_info")
        if not isinstance(row, Mapping) or not isinstance(row.get("responses_create_params"), Mapping):
            raise RolloutDataFailure(
                f"extra_env_info must be a row of NeMo-Gym with responses_create_params, got {shown(row)}; correct the data"
            )
        params = copy.deepcopy(dict(row["responses_create_params"]))
        params["temperature"], params["top_p"] = self._setting("temperature"), self._setting("top_p")
        limit, row_limit = self._setting("max_new_tokens"), params.get("max_output_tokens")
        params["max_output_tokens"] = limit if row_limit is None else min(row_limit, limit)
        template = {**row, "responses_create_params": params}
        return [{**copy.deepcopy(template), "_rowidx": index} for index in range(self.num_generations_per_prompt)]

    def _setting(self, key: str) -> Any:
        if key not in self.generation_config:
            raise RolloutConfigError(f"generation_config must have {key}, got {sorted(self.generation_config)}; add it")
        return self.generation_config[key]

    async def _run_rollouts(
        self, inputs: list[dict[str, Any]], timer: Any, timer_prefix: str
    ) -> tuple[list[Completion], dict[str, Any]]:
        """Run the rows `inputs` and return their completions, in the order of rows, and the metrics of the group.

        `timer.time(tag)` measures the parts of the run. Raises GymProtocolFailure, a ValueError, for an answer to a row that was not sent
        or was answered before, GymTransportError for rows that stay without an answer, and RolloutTimeout.
        """
        agent = (inputs[0].get("agent_ref") or {}).get("name")
        if not isinstance(agent, str):
            raise RolloutDataFailure(
                f"a row of NeMo-Gym must have agent_ref.name, got {shown(inputs[0].get('agent_ref'))}; correct the data"
            )
        clock = Timers().clock
        start = clock()
        with timer.time(f"{timer_prefix}/run_rollouts"):
            with timer.time(f"{timer_prefix}/await_results"):
                results = await self._all_results(inputs, timer_prefix)
            answered_at = clock()
            with timer.time(f"{timer_prefix}/postprocess_results"):
                completions = [self._result_to_completion(result) for result in results]
            end = clock()
        with timer.time(f"{timer_prefix}/compute_metrics"):
            metrics = self._compute_rollout_metrics(completions, agent)
        share = (end - answered_at) / max(end - start, 1e-9)
        return completions, metrics | {f"{timer_prefix}/postprocess_results_pct": 100.0 * share}

    async def _all_results(self, inputs: list[dict[str, Any]], timer_prefix: str) -> list[dict[str, Any]]:
        """Return the results of all rows; rows without an answer are sent again, under one deadline."""
        results: dict[int, dict[str, Any]] = {}
        reasons: dict[int, str] = {}
        try:
            async with deadline(self.group_seconds, f"a group of {len(inputs)} NeMo-Gym rows"):
                for attempt in range(self.max_gym_row_attempts):
                    missing = [row for index, row in enumerate(inputs) if index not in results]
                    if not missing:
                        break
                    if attempt and self._on_redispatch is not None:
                        self._on_redispatch(len(missing))
                    await self._collect(missing, len(inputs), results, reasons, timer_prefix)
        except RolloutTimeout as error:
            raise RolloutTimeout(f"{error}; {_missing(inputs, results, reasons)}") from error
        if len(results) < len(inputs):
            raise GymTransportError(
                f"every row must be answered in {self.max_gym_row_attempts} attempts (max_gym_row_attempts); "
                f"{_missing(inputs, results, reasons)}"
            )
        return [results[index] for index in range(len(inputs))]

    async def _collect(
        self,
        rows: list[dict[str, Any]],
        total: int,
        results: dict[int, dict[str, Any]],
        reasons: dict[int, str],
        timer_prefix: str,
    ) -> None:
        """Send `rows` once and add their results; of rows without one, add the reason."""
        if TASK not in self.task_to_env:
            raise RolloutConfigError(f"task_to_env must have {TASK!r}, got {sorted(map(str, self.task_to_env))}")
        requested = {row["_rowidx"] for row in rows}
        answered: set[int] = set()
        stream = self.task_to_env[TASK].run_rollouts(rows, self.tokenizer, timer_prefix)
        async with contextlib.aclosing(stream):
            async for index, result in stream:
                if type(index) is not int or not 0 <= index < total:
                    raise GymProtocolFailure(f"NeMo-Gym returned invalid row index {index!r} for {total} inputs")
                if index in answered or index in results:
                    raise GymProtocolFailure(f"NeMo-Gym returned duplicate row index {index}")
                if index not in requested:
                    raise GymProtocolFailure(f"NeMo-Gym returned row index {index}, which was not dispatched")
                answered.add(index)
                if isinstance(result, RowFailure):
                    reasons[index] = result.reason
                else:
                    results[index] = result

    def _result_to_completion(self, result: Mapping[str, Any]) -> Completion:
        """Return the completion of one row's `{message_log, full_result}`.

        A row that its environment masks, or that has a `failure_kind`, has the reward NaN and the loss multiplier 0. Raises
        RolloutDataFailure for a reward or log-probabilities that are missing or not finite.
        """
        answer = dict(result["full_result"])
        if not self.mask_env_flagged_samples:
            _drop_mask(answer)
        masked = is_masked(answer) or bool(answer.get("failure_kind"))
        log = [_with_tensors(message) for message in result["message_log"]]
        generated = [len(message["token_ids"]) for message in log if message["role"] == "assistant"]
        reason = FinishReason.STOP
        if sum(len(message["token_ids"]) for message in log) >= self.max_seq_len:
            reason = FinishReason.SEQ_LIMIT
        elif is_incomplete(answer):
            reason = FinishReason.LENGTH
        parts = answer.get("reward_components")
        return Completion(
            message_log=log,  # type: ignore[arg-type]
            env_extras=answer,
            truncated=reason.truncated,
            reward=math.nan if masked else _reward(answer),
            finish_reason=reason.value,
            loss_multiplier=0.0 if masked else 1.0,
            metrics={"turns": len(generated), "gen_tokens": sum(generated)}
            | {f"reward/{name}": value for name, value in (parts if isinstance(parts, Mapping) else {}).items()},
        )

    def _compute_rollout_metrics(self, completions: Sequence[Completion], agent_name: str) -> dict[str, Any]:
        """Return the group's metrics by name, those of the agent's answers under `agent_name/`.

        Masked samples count in `masked_rows` and by kind of failure, and in no statistic of what the agent answered but `mask_sample`.
        """
        n = max(len(completions), 1)
        used = [completion for completion in completions if not math.isnan(completion.reward)]
        lengths = [_lengths(completion) for completion in completions]
        generated = [sum(reply_lengths) for _, reply_lengths in lengths]
        longest = [max(reply_lengths, default=0) for _, reply_lengths in lengths]
        truncated = sum(completion.truncated for completion in completions) / n
        turns = [sum(message["role"] == "user" for message in c.message_log) for c in completions]
        metrics = prefixed("total_reward", [completion.reward for completion in used])
        metrics |= prefixed("turns_per_sample", turns, percentiles=(95, 99))
        metrics |= prefixed("total_tokens_per_sample", [total for total, _ in lengths])
        metrics |= prefixed("gen_tokens_per_sample", generated)
        metrics["mean_gen_tokens_per_sample"] = sum(generated) / n
        metrics["max_gen_tokens_per_turn/max"] = max(longest, default=0)
        metrics["max_gen_tokens_per_turn/mean"] = sum(longest) / n
        metrics["max_gen_tokens_per_turn/p95"] = percentile(longest, 95)
        metrics |= {"truncation_rate": truncated, "natural_termination_rate": 1.0 - truncated}
        metrics["masked_rows"] = len(completions) - len(used)
        for name, values in _columns(completions).items():
            metrics |= prefixed(f"{agent_name}/{name}", values) | {f"{agent_name}/{name}/count": len(values)}
        kinds = Counter(str((completion.env_extras or {}).get("failure_kind") or "") for completion in completions)
        metrics |= {f"{agent_name}/{kind}/failures": count for kind, count in kinds.items() if kind}
        metrics[f"{agent_name}/full_result"] = [
            json.dumps(completion.env_extras, separators=(",", ":"), default=str) for completion in completions
        ]
        return metrics

    async def _version(self) -> int:
        version = self.policy_version if self._weight_version is None else self._weight_version()
        return await version if inspect.isawaitable(version) else version


def _name_rows(rows: Sequence[dict[str, Any]], sample: Mapping[str, Any]) -> None:
    """Give every row its id, under which servers may repeat a finished answer, and the indices that agents of NeMo-Gym ask for."""
    for index, row in enumerate(rows):
        row[ROW_ID] = f"{group_name(sample)}_g{index}_a{sample.get('attempt', 1)}"
        row.setdefault("_ng_task_index", sample["idx"])
        row["_ng_rollout_index"] = index


def _missing(inputs: Sequence[Any], results: Mapping[int, Any], reasons: Mapping[int, str]) -> str:
    """Return which rows have no answer, and why the first of them."""
    rows = [index for index in range(len(inputs)) if index not in results]
    descriptions = [f"row {index}: {reasons[index]}" for index in rows if index in reasons][:NAMED_FAILURES]
    return "; ".join([f"rows without an answer: {rows}", *descriptions])


def _prompt(sample: Mapping[str, Any], completions: Sequence[Completion]) -> Any:
    """Return the sample's own prompt if its tokens begin every log, otherwise the tokens that the first turns have in common.

    The model server applies the chat template, with tools that the prompt of the data set may not have.
    """
    common = common_prefix(completions)
    message_log = sample["message_log"]
    if message_log and all("token_ids" in message for message in message_log):
        ids = torch.cat([as_token_tensor(message["token_ids"]) for message in message_log])
        if len(ids) <= len(common) and torch.equal(ids, common[: len(ids)]):
            return message_log
    return [{"role": "user", "content": "", "token_ids": common}]


def _with_tensors(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `message` with ids [T] int64 and, for the assistant, finite log-probabilities [T] float32."""
    result = {**message, "token_ids": as_token_tensor(message["token_ids"])}
    if message["role"] == "assistant" and message.get("generation_logprobs") is not None:
        logprobs = torch.as_tensor(message["generation_logprobs"], dtype=torch.float32).reshape(-1)
        if not bool(logprobs.isfinite().all()):
            raise RolloutDataFailure(f"log-probabilities must be finite, got {shown(message['generation_logprobs'])}")
        result["generation_logprobs"] = logprobs
    return result


def _reward(answer: Mapping[str, Any]) -> float:
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutDataFailure(
            f"an answer must have a finite reward, got {shown(reward)}; a verifier that cannot score a row sets mask_sample"
        )
    return float(reward)


def _drop_mask(answer: dict[str, Any]) -> None:
    """Remove `mask_sample` from `answer`, whose nested objects are not changed in place."""
    answer.pop("mask_sample", None)
    config = answer.get("instance_config")
    if isinstance(config, Mapping):
        answer["instance_config"] = {key: value for key, value in config.items() if key != "mask_sample"}


def _lengths(completion: Completion) -> tuple[int, list[int]]:
    """Return the tokens of the whole log, and those of each turn of the policy."""
    reply_lengths = [len(message["token_ids"]) for message in completion.message_log if message["role"] == "assistant"]
    return sum(len(message["token_ids"]) for message in completion.message_log), reply_lengths


def _columns(completions: Sequence[Completion]) -> dict[str, list[float]]:
    """Return the finite numbers and booleans of the answers by key, of those rows that have the key."""
    columns: dict[str, list[float]] = {}
    for completion in completions:
        for key, value in (completion.env_extras or {}).items():
            included = key == "mask_sample" or not math.isnan(completion.reward)
            if included and isinstance(value, bool | int | float) and math.isfinite(value):
                columns.setdefault(key, []).append(float(value))
    return columns
