"""Prompts in, records out, with retries and budgets: `RolloutManager`, held by every rollout worker (rollouts.md 5).

In a run the worker calls `run` (retries only; it gives up by a typed error, and the runner's ledger holds the budgets).
Stand-alone users call `generate_and_push` with a buffer of their own, and the budgets of `RetryPolicy` apply.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from enum import StrEnum
from typing import Any, Protocol

from rl_core.api.errors import RolloutConfigError, RolloutDataFailure, RolloutRedispatchExhausted, RolloutTimeout
from rl_core.api.records import PromptGroupRecord
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.rollouts.generation import GenerationInterface
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from rl_core.rollouts.retry import FailureKind, RetryPolicy, classify_failure, deadline

__all__ = [
    "AsyncRolloutImpl",
    "FailureKind",
    "PushOutcome",
    "RetryPolicy",
    "RolloutManager",
    "TokenizerType",
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


class TokenizerType(Protocol):
    """The calls of a tokenizer that rollouts make. `rl_core.data.tokenizer.Tokenizer` and Hugging Face's have them."""

    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return `{"input_ids": ids}`."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""


class PushOutcome(StrEnum):
    """What became of a prompt."""

    COMMITTED = "committed"
    SKIPPED = "skipped"


class RolloutManager:
    """Runs prompt groups with retries by the kind of failure."""

    def __init__(
        self,
        tokenizer: Any,
        task_to_env: Mapping[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        max_rollout_turns: int | None = None,
        policy_generation: GenerationInterface | None = None,
        generation_config: Mapping[str, Any] | None = None,
        use_nemo_gym: bool = False,
        *,
        retry: RetryPolicy | None = None,
        buffer: Any = None,
        weight_version: Callable[[], int | Awaitable[int]] | None = None,
        group_seconds: float | None = None,
        **options: Any,
    ) -> None:
        """`group_seconds` bounds one attempt at a group; `options` go to AsyncRolloutImpl (seed, env_step_seconds).

        `buffer` has reserve, commit and remove; `weight_version` reads the version now (None: the backend's). Raises
        RolloutConfigError.
        """
        if num_generations_per_prompt < 1:
            raise RolloutConfigError(
                f"num_generations_per_prompt must be >= 1, got {num_generations_per_prompt}; raise it"
            )
        if use_nemo_gym:
            if generation_config is None:
                raise RolloutConfigError("generation_config is required for the NeMo-Gym path, got None; pass it")
            raise RolloutConfigError("use_nemo_gym is not part of this installation yet; use the native path (False)")
        if policy_generation is None:
            raise RolloutConfigError(
                "policy_generation is required for the native async path, got None; pass a backend"
            )
        self._impl = AsyncRolloutImpl(
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
        self._weight_version = weight_version or (lambda: self._impl.policy_version)
        self._group_seconds = group_seconds
        self._counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._redispatched: dict[str, int] = {}
        self._skipped_prompts = 0
        self._consecutive_infra_drops = 0

    async def run_rollout(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Return the group of `input_sample` in one attempt, under the group deadline."""
        what = f"rollout of group {input_sample.get('group_id', input_sample['idx'])}"
        async with deadline(self._group_seconds, what):
            return await self._impl.run_rollout(input_sample)

    async def run(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Return the group after as many attempts as the policy grants; raises the last failure, unchanged.

        `attempt` of the sample (and so its seeds) rises for data and deadline retries only.
        """
        return await self._attempts(input_sample, self.run_rollout)

    async def generate_and_push(
        self,
        sample: Mapping[str, Any],
        *,
        target_step: int | None = None,
        inflight_registry: MutableMapping[str, Any] | None = None,
    ) -> PushOutcome:
        """Run `sample` and commit its record to the buffer; SKIPPED when it failed and a budget allows the drop.

        Every attempt has a slot `group_id#n`, removed on failure or cancellation; `inflight_registry` maps the slots
        that run to their start version. Raises where no budget is left: data and deadline failures as they came,
        infrastructure as RolloutRedispatchExhausted.
        """
        if self.buffer is None:
            raise RolloutConfigError("generate_and_push needs a buffer, got None; pass buffer= or call run()")
        tries = 0

        async def once(attempted: Mapping[str, Any]) -> PromptGroupRecord:
            nonlocal tries
            tries += 1
            return await self._push_once(attempted, f"{_name(sample)}#{tries}", target_step, inflight_registry)

        try:
            await self._attempts(sample, once)
        except Exception as error:  # noqa: BLE001 - whatever ended the last attempt is dropped by budget or raised again
            self._drop(sample, error, tries)
            return PushOutcome.SKIPPED
        self._counts["committed_total"] += 1
        self._consecutive_infra_drops = 0
        return PushOutcome.COMMITTED

    def metrics(self) -> dict[str, int]:
        """Return the counters as `rollout/<name>`; redispatches by reason as `rollout/redispatch_total/<reason>`."""
        found = {f"rollout/{name}": value for name, value in self._counts.items()}
        found["rollout/redispatch_total"] = sum(self._redispatched.values())
        return found | {f"rollout/redispatch_total/{kind}": count for kind, count in self._redispatched.items()}

    async def _attempts(
        self, sample: Mapping[str, Any], once: Callable[[Mapping[str, Any]], Awaitable[PromptGroupRecord]]
    ) -> PromptGroupRecord:
        failures: dict[FailureKind, int] = {}
        seed_attempt = sample.get("attempt", 1)
        while True:
            attempted = sample if seed_attempt == sample.get("attempt", 1) else {**sample, "attempt": seed_attempt}
            try:
                return await once(attempted)
            except RolloutConfigError:
                raise
            except Exception as error:
                kind = classify_failure(error)
                failures[kind] = failures.get(kind, 0) + 1
                self._count_failure(kind)
                if failures[kind] >= self.retry.attempts(kind):
                    raise
                logger.warning("group %s: %s failure, trying again: %s", _name(sample), kind.value, error)
            self._redispatched[kind.value] = self._redispatched.get(kind.value, 0) + 1
            if kind is FailureKind.DATA:
                self._counts["data_retry_total"] += 1
            if kind is not FailureKind.INFRASTRUCTURE:
                seed_attempt += 1
            delay = self.retry.delay(kind, failures[kind])
            if delay:
                await asyncio.sleep(delay)

    async def _push_once(
        self,
        sample: Mapping[str, Any],
        slot: str,
        target_step: int | None,
        registry: MutableMapping[str, Any] | None,
    ) -> PromptGroupRecord:
        start = await _resolved(self._weight_version())
        try:
            await _resolved(self.buffer.reserve(slot, start, target_step))
            if registry is not None:
                registry[slot] = start
            record = await self.run_rollout(sample)
            await _resolved(self.buffer.commit(slot, record, start, await _resolved(self._weight_version())))
            return record
        except BaseException:
            await self._remove(slot)
            raise
        finally:
            if registry is not None:
                registry.pop(slot, None)

    async def _remove(self, slot: str) -> None:
        try:
            await _resolved(self.buffer.remove(slot))
        except Exception:
            logger.exception("slot %s could not be removed from the buffer", slot)

    def _count_failure(self, kind: FailureKind) -> None:
        if kind is FailureKind.DATA:
            self._counts["data_failures_total"] += 1
        elif kind is FailureKind.DEADLINE:
            self._counts["deadline_total"] += 1

    def _drop(self, sample: Mapping[str, Any], error: Exception, tries: int) -> None:
        """Count the prompt as dropped, or raise where its budget does not allow it.

        Two budgets, because they ask different things: data that fails does not get better over a run, while machinery
        that answers anyone at all is not down.
        """
        kind = classify_failure(error)
        if isinstance(error, RolloutConfigError):
            raise error
        what = f"group {_name(sample)} failed after {tries} attempt(s): {error}"
        if kind is FailureKind.INFRASTRUCTURE:
            self._drop_for_infrastructure(what, error)
        else:
            self._drop_for_data(what, error, kind)
        self._counts["skipped_total"] += 1
        logger.warning("dropped: %s", what)

    def _drop_for_infrastructure(self, what: str, error: Exception) -> None:
        limit = self.retry.max_consecutive_dropped_prompts
        self._consecutive_infra_drops += 1
        if self._consecutive_infra_drops > limit:
            text = f"{what}; no more prompts may be dropped in a row, max_consecutive_dropped_prompts={limit}"
            raise RolloutRedispatchExhausted(text) from error
        self._counts["infra_drops_total"] += 1
        longest = max(self._counts["max_consecutive_infra_drops"], self._consecutive_infra_drops)
        self._counts["max_consecutive_infra_drops"] = longest

    def _drop_for_data(self, what: str, error: Exception, kind: FailureKind) -> None:
        limit = self.retry.max_skipped_prompts
        if limit == 0:
            raise error
        self._skipped_prompts += 1
        if self._skipped_prompts > limit:
            raised = RolloutTimeout if kind is FailureKind.DEADLINE else RolloutDataFailure
            raise raised(f"{what}; no more prompts may be dropped in the run, max_skipped_prompts={limit}") from error


def _name(sample: Mapping[str, Any]) -> str:
    given = sample.get("group_id")
    return str(sample["idx"] if given is None else given)


async def _resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
