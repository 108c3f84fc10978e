"""Which failures are worth another attempt, how often and after how long (rollouts.md 5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from rl_core.api.errors import DataError, InfrastructureError, RolloutConfigError, RolloutTimeout

MAX_CAUSE_DEPTH = 8
"""Causes followed from a failure before it counts as unknown."""
RETRYABLE_STATUS = frozenset({408, 429})
"""HTTP client errors that speak of load, not of the request."""


class FailureKind(StrEnum):
    """Who can mend a failure: other machinery, nobody (the data), or more time."""

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Attempts per kind of failure and budgets of dropped prompts."""

    infrastructure_attempts: int = 5
    """Attempts in all when machinery fails."""
    data_attempts: int = 2
    """Attempts in all when the sample fails."""
    deadline_attempts: int = 2
    """Attempts in all when time runs out."""
    base_delay: float = 1.0
    """Seconds before the second attempt after a failure of machinery; doubles with each."""
    max_delay: float = 30.0
    """Longest delay, seconds."""
    max_skipped_prompts: int = 0
    """Prompts that may be dropped over the run for data or deadline failures; 0 = the first is raised."""
    max_consecutive_dropped_prompts: int = 0
    """Prompts that may be dropped in a row for failures of machinery; 0 = the first is raised."""

    def __post_init__(self) -> None:
        for name in ("infrastructure_attempts", "data_attempts", "deadline_attempts"):
            if getattr(self, name) < 1:
                raise RolloutConfigError(f"{name} must be >= 1, got {getattr(self, name)}; 1 = no retry")

    def attempts(self, kind: FailureKind) -> int:
        """Return the attempts in all for `kind`."""
        return {
            FailureKind.INFRASTRUCTURE: self.infrastructure_attempts,
            FailureKind.DATA: self.data_attempts,
            FailureKind.DEADLINE: self.deadline_attempts,
        }[kind]

    def delay(self, kind: FailureKind, failures: int) -> float:
        """Return the seconds to wait after the `failures`-th failure of `kind`, counted from 1."""
        if kind is not FailureKind.INFRASTRUCTURE:
            return 0.0
        return min(self.max_delay, self.base_delay * 2.0 ** (failures - 1))


def classify_failure(exc: BaseException) -> FailureKind:
    """Return the kind of `exc`: typed where it was raised, else by its causes (not contexts) to depth 8.

    An explicit data failure anywhere in the chain wins; what nobody typed is DATA.
    """
    kinds = [_kind(link) for link in _causes(exc)]
    if FailureKind.DATA in kinds:
        return FailureKind.DATA
    return next((kind for kind in kinds if kind is not None), FailureKind.DATA)


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) <= MAX_CAUSE_DEPTH:
        chain.append(link)
        link = link.__cause__
    return chain


def _kind(error: BaseException) -> FailureKind | None:
    """Return the kind that this error alone states, None where it states none."""
    if isinstance(error, RolloutTimeout):
        return FailureKind.DEADLINE
    if isinstance(error, DataError):
        return FailureKind.DATA
    status = getattr(error, "status", None)
    status = getattr(error, "status_code", None) if status is None else status
    if isinstance(status, int) and status >= 400:
        retryable = status >= 500 or status in RETRYABLE_STATUS
        return FailureKind.INFRASTRUCTURE if retryable else FailureKind.DATA
    if isinstance(error, InfrastructureError | ConnectionError):
        return FailureKind.INFRASTRUCTURE
    return None


@asynccontextmanager
async def deadline(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Bound the block to `seconds` (None = unbounded); only its own expiry becomes RolloutTimeout.

    A TimeoutError raised inside passes unchanged, and so does cancellation from outside.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired() or not isinstance(error.__cause__, asyncio.CancelledError):
            raise
        raise RolloutTimeout(f"{what} missed its deadline of {seconds:g} s") from error
