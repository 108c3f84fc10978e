"""Retries of failed prompt groups: the kind of a failure, the attempts and delays of each kind, and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from rl_core.api.errors import DataError, InfrastructureError, RolloutConfigError, RolloutTimeout

MAX_CAUSE_DEPTH = 8
"""Longest chain of causes that is followed to find the kind of a failure."""
RETRYABLE_STATUS = frozenset({408, 429})
"""HTTP client errors that are due to load, not to the request."""


class FailureKind(StrEnum):
    """Kind of a failure: INFRASTRUCTURE (a lost or overloaded process), DATA (the sample itself) or DEADLINE (a missed deadline)."""

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Attempts and delays per kind of failure, and how many prompts may be dropped."""

    infrastructure_attempts: int = 5
    """Attempts in total for infrastructure failures."""
    data_attempts: int = 2
    """Attempts in total for data failures."""
    deadline_attempts: int = 2
    """Attempts in total for missed deadlines."""
    base_delay: float = 1.0
    """Seconds before the second attempt after an infrastructure failure; doubles with every attempt."""
    max_delay: float = 30.0
    """Longest delay, seconds."""
    max_skipped_prompts: int = 0
    """Prompts that may be dropped in total for data and deadline failures; 0 = the first failure is raised. Used without a job only."""
    max_consecutive_dropped_prompts: int = 0
    """Prompts that may be dropped in a row for infrastructure failures; 0 = the first failure is raised. Used without a job only."""

    def __post_init__(self) -> None:
        for name in ("infrastructure_attempts", "data_attempts", "deadline_attempts"):
            if getattr(self, name) < 1:
                raise RolloutConfigError(f"{name} must be >= 1, got {getattr(self, name)}; 1 = no retry")

    def attempts(self, kind: FailureKind) -> int:
        """Return the attempts in total for failures of `kind`."""
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
    """Return the kind of `exc`.

    It is that of the first error with a known type among `exc` and its causes (`__cause__`), at most MAX_CAUSE_DEPTH deep. A data failure
    anywhere in the chain takes precedence, and a failure of unknown type is DATA. Contexts (`__context__`) are ignored.
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
    """Return the kind that the type or HTTP status of `error` states, None if neither does."""
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
    """Raise RolloutTimeout, naming `what`, if the block takes more than `seconds`. None means no limit.

    A TimeoutError that the block raises itself and a cancellation from outside pass unchanged.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired() or not isinstance(error.__cause__, asyncio.CancelledError):
            raise
        raise RolloutTimeout(f"{what} missed its deadline of {seconds:g} s") from error
