"""`RolloutManager`: runs prompt groups and retries those that fail.

In a job the rollout worker calls `run`, which raises a group's last failure, and the runner decides whether the prompt is dropped. Without
a job, `generate_and_push` puts groups into a buffer of the caller's and drops prompts within the budgets of `RetryPolicy` (see `buffered`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rl_core.api.errors import RolloutConfigError
from rl_core.api.records import PromptGroupRecord
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.rollouts.buffered import BufferedGroups, PushOutcome
from rl_core.rollouts.episode import group_name
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from rl_core.rollouts.nemo_gym import AsyncNemoGymRolloutImpl
from rl_core.rollouts.padded import GenerationInterface
from rl_core.rollouts.retry import FailureKind, RetryPolicy, classify_failure, deadline

__all__ = [
    "AsyncNemoGymRolloutImpl",
    "AsyncRolloutImpl",
    "FailureKind",
    "PushOutcome",
    "RetryPolicy",
    "RolloutManager",
    "aggregate_rollout_metrics",
    "classify_failure",
    "deadline",
]

logger = logging.getLogger(__name__)
UNBOUNDED_TURNS = 999999
COUNTERS = (
    "committed_total",
    "skipped_total",
    "data_retry_total",
    "data_failures_total",
    "deadline_total",
    "gym_row_redispatch_total",
    "infra_drops_total",
    "max_consecutive_infra_drops",
)


class RolloutManager:
    """Runs prompt groups. A failed attempt is repeated as often as `RetryPolicy` allows for its kind of failure."""

    def __init__(
        self,
        tokenizer: Any,
        task_to_env: Mapping[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        max_rollout_turns: int | None = None,
        policy_generation: RowGenerator | GenerationInterface | None = None,
        generation_config: Mapping[str, Any] | None = None,
        use_nemo_gym: bool = False,
        *,
        retry: RetryPolicy | None = None,
        buffer: Any = None,
        weight_version: Callable[[], int | Awaitable[int]] | None = None,
        group_seconds: float | None = None,
        implementation: type[AsyncRolloutImpl] = AsyncRolloutImpl,
        **options: Any,
    ) -> None:
        """Create a manager; the arguments that are not listed here are those of `AsyncRolloutImpl`.

        Args:
            max_rollout_turns: Most turns of a sample; None = no limit.
            generation_config: Sampling settings of the rows of NeMo-Gym: `temperature`, `top_p` and `max_new_tokens`.
            use_nemo_gym: Whether the agents of NeMo-Gym servers run the episodes, through `task_to_env["nemo_gym"]`.
            retry: Attempts and delays by kind of failure; None = the defaults of `RetryPolicy`.
            buffer: Where `generate_and_push` puts groups; see `buffered.BufferedGroups`.
            weight_version: Returns the current policy version for the buffer; None = that of `policy_generation`.
            group_seconds: Deadline of one attempt at a group; None = no deadline.
            implementation: Runs the groups without NeMo-Gym.
            **options: Passed to `implementation` (seed, env_step_seconds, greedy), or to `AsyncNemoGymRolloutImpl`.

        Raises RolloutConfigError for settings that do not fit together.
        """
        if num_generations_per_prompt < 1:
            raise RolloutConfigError(
                f"num_generations_per_prompt must be >= 1, got {num_generations_per_prompt}; raise it"
            )
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._impl: AsyncRolloutImpl | AsyncNemoGymRolloutImpl
        if use_nemo_gym:
            if generation_config is None:
                raise RolloutConfigError("generation_config is required for the NeMo-Gym path, got None; pass it")
            self._impl = AsyncNemoGymRolloutImpl(
                tokenizer,
                task_to_env,
                num_generations_per_prompt,
                max_seq_len,
                generation_config,
                max_rollout_turns,
                group_seconds=group_seconds,
                policy_generation=policy_generation,
                weight_version=weight_version,
                on_redispatch=self._count_rows_sent_again,
                **options,
            )
            group_seconds = None  # the implementation keeps the deadline, so that its error names the missing rows
        elif policy_generation is None:
            raise RolloutConfigError(
                "policy_generation is required for the native async path, got None; pass a backend"
            )
        else:
            self._impl = implementation(
                tokenizer,
                task_to_env,
                num_generations_per_prompt,
                max_seq_len,
                policy_generation,
                UNBOUNDED_TURNS if max_rollout_turns is None else max_rollout_turns,
                **options,
            )
        self.retry = retry or RetryPolicy()
        self.buffer = buffer
        self._group_seconds = group_seconds
        self._redispatched: Counter[str] = Counter()
        version = weight_version or (lambda: self._impl.policy_version)
        self._buffered = BufferedGroups(buffer, self.retry, version, self._counts)

    async def run_rollout(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Generate the group of `input_sample` in one attempt, without retries. Raises RolloutTimeout after `group_seconds`."""
        async with deadline(self._group_seconds, f"rollout of group {group_name(input_sample)}"):
            return await self._impl.run_rollout(input_sample)

    async def run(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Generate the group of `input_sample`, with as many attempts as the retry policy allows. Raises the last failure unchanged.

        The attempt number of the sample, on which its sampling seeds depend, rises only after data failures and deadlines.
        """
        return await self._attempts(input_sample, self.run_rollout)

    async def generate_and_push(
        self,
        sample: Mapping[str, Any],
        *,
        target_step: int | None = None,
        inflight_registry: MutableMapping[str, Any] | None = None,
    ) -> PushOutcome:
        """Generate the group of `sample` into the buffer. Returns SKIPPED if it failed and a budget allows to drop the prompt.

        Every attempt reserves a slot `group_id#n`, which is removed if the attempt fails or is cancelled. `inflight_registry` (None: not
        kept) maps the slots that are being generated to their start version. Without budget left, raises data and deadline failures
        unchanged, and infrastructure failures as RolloutRedispatchExhausted.
        """
        if self.buffer is None:
            raise RolloutConfigError("generate_and_push needs a buffer, got None; pass buffer= or call run()")
        attempts = 0

        async def attempt(attempted: Mapping[str, Any]) -> PromptGroupRecord:
            nonlocal attempts
            attempts += 1
            slot = f"{group_name(sample)}#{attempts}"
            return await self._buffered.generate(
                slot, lambda: self.run_rollout(attempted), target_step, inflight_registry
            )

        try:
            await self._attempts(sample, attempt)
        except Exception as error:  # noqa: BLE001 - any failure of the last attempt drops the group or is raised again
            self._buffered.drop(f"group {group_name(sample)} failed after {attempts} attempt(s): {error}", error)
            return PushOutcome.SKIPPED
        self._buffered.committed()
        return PushOutcome.COMMITTED

    def metrics(self) -> dict[str, int]:
        """Return the counters as `rollout/<name>`, and retried attempts as `rollout/redispatch_total` and by kind of failure."""
        counters = {f"rollout/{name}": value for name, value in self._counts.items()}
        counters["rollout/redispatch_total"] = self._redispatched.total()
        return counters | {f"rollout/redispatch_total/{kind}": count for kind, count in self._redispatched.items()}

    def _count_rows_sent_again(self, rows: int) -> None:
        self._counts["gym_row_redispatch_total"] += rows

    async def _attempts(
        self, sample: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], Awaitable[PromptGroupRecord]]
    ) -> PromptGroupRecord:
        """Return what `attempt(sample)` returns, repeated after failures; raises the last failure unchanged."""
        failures: Counter[FailureKind] = Counter()
        while True:
            try:
                return await attempt(sample)
            except RolloutConfigError:
                raise
            except Exception as error:
                kind = classify_failure(error)
                failures[kind] += 1
                self._counts["data_failures_total"] += kind is FailureKind.DATA
                self._counts["deadline_total"] += kind is FailureKind.DEADLINE
                if failures[kind] >= self.retry.attempts(kind):
                    raise
                logger.warning("group %s: %s failure, trying again: %s", group_name(sample), kind.value, error)
            self._redispatched[kind.value] += 1
            self._counts["data_retry_total"] += kind is FailureKind.DATA
            worker_lost = kind is FailureKind.INFRASTRUCTURE
            sample = {**sample, "attempt": sample.get("attempt", 1) + (not worker_lost), "resumed": worker_lost}
            if delay := self.retry.delay(kind, failures[kind]):
                await asyncio.sleep(delay)
