"""`BufferedGroups`: puts finished groups into a buffer of the caller's, and counts dropped prompts. Used outside a job only."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from typing import Any

from rl_core.api.errors import RolloutConfigError, RolloutDataFailure, RolloutRedispatchExhausted, RolloutTimeout
from rl_core.api.records import PromptGroupRecord
from rl_core.rollouts.retry import FailureKind, RetryPolicy, classify_failure

logger = logging.getLogger(__name__)


class PushOutcome(StrEnum):
    """What happened to a prompt: COMMITTED, its group is in the buffer; SKIPPED, it failed and was dropped."""

    COMMITTED = "committed"
    SKIPPED = "skipped"


class BufferedGroups:
    """Puts groups into a buffer that the caller provides, for example the replay buffer of a training script.

    The buffer has `reserve(slot, version, target_step)`, which announces a group, `commit(slot, record, start_version, end_version)`, which
    stores it with the policy versions at its start and end, and `remove(slot)`. Each may be synchronous or asynchronous.
    """

    def __init__(
        self,
        buffer: Any,
        retry: RetryPolicy,
        weight_version: Callable[[], int | Awaitable[int]],
        counts: Counter[str],
    ) -> None:
        """`weight_version()` returns the current policy version; `counts` receives the counters."""
        self._buffer = buffer
        self._retry = retry
        self._weight_version = weight_version
        self._counts = counts
        self._consecutive_infra_drops = 0

    async def generate(
        self,
        slot: str,
        run: Callable[[], Awaitable[PromptGroupRecord]],
        target_step: int | None,
        registry: MutableMapping[str, Any] | None,
    ) -> PromptGroupRecord:
        """Reserve `slot`, `run` the group and commit its record; the slot is removed if any of this fails or is cancelled."""
        start = await _resolved(self._weight_version())
        try:
            await _resolved(self._buffer.reserve(slot, start, target_step))
            if registry is not None:
                registry[slot] = start
            record = await run()
            await _resolved(self._buffer.commit(slot, record, start, await _resolved(self._weight_version())))
            return record
        except BaseException:
            try:
                await _resolved(self._buffer.remove(slot))
            except Exception:
                logger.exception("slot %s could not be removed from the buffer", slot)
            raise
        finally:
            if registry is not None:
                registry.pop(slot, None)

    def committed(self) -> None:
        """Count a committed group; it resets the budget of consecutive drops."""
        self._counts["committed_total"] += 1
        self._consecutive_infra_drops = 0

    def drop(self, what: str, error: Exception) -> None:
        """Count a prompt that failed with `error` as dropped. Raises when its budget is used up; `what` is the beginning of the message.

        There are two budgets. Data failures are counted over the whole run, because bad data stays bad. Only consecutive infrastructure
        failures are counted, because infrastructure that completes any group is not down.
        """
        if isinstance(error, RolloutConfigError):
            raise error
        kind = classify_failure(error)
        if kind is FailureKind.INFRASTRUCTURE:
            limit = self._retry.max_consecutive_dropped_prompts
            self._consecutive_infra_drops += 1
            if self._consecutive_infra_drops > limit:
                text = f"{what}; no more prompts may be dropped in a row, max_consecutive_dropped_prompts={limit}"
                raise RolloutRedispatchExhausted(text) from error
            self._counts["infra_drops_total"] += 1
            longest = max(self._counts["max_consecutive_infra_drops"], self._consecutive_infra_drops)
            self._counts["max_consecutive_infra_drops"] = longest
        else:
            limit = self._retry.max_skipped_prompts
            if limit == 0:
                raise error
            dropped = self._counts["skipped_total"] - self._counts["infra_drops_total"]
            if dropped >= limit:
                raised = RolloutTimeout if kind is FailureKind.DEADLINE else RolloutDataFailure
                raise raised(
                    f"{what}; no more prompts may be dropped in the run, max_skipped_prompts={limit}"
                ) from error
        self._counts["skipped_total"] += 1
        logger.warning("dropped: %s", what)


async def _resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
