"""The runner's ledger as a rollout sees it: the port `LeaseSource`, its way over the hub, and the renewal of what is held.

The ledger is the only one that knows who holds which group. A lease that nobody renews ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rl_core.api.errors import RLJobError
from rl_core.messages.groups import PromptLease, RequeueReason

logger = logging.getLogger(__name__)
ANSWER_MARGIN_S = 10.0
"""Seconds beyond those that the runner may hold a poll, after which its answer counts as lost."""
RENEWALS_PER_LEASE = 3
RETRY_SECONDS = 1.0
"""Pause before a renewal that failed is tried again."""


class LeaseSource(Protocol):
    """Where prompt groups come from and go back to. Implemented by `HubLeases`; all raise RLJobError."""

    async def lease_groups(self, want: int, seconds: float, version: int) -> Sequence[PromptLease]:
        """Return at most `want` groups for weights of `version`: early with what there is, none after `seconds`."""
        ...

    async def renew(self, tokens: Sequence[str]) -> Sequence[str]:
        """Let the leases of `tokens` run anew; return those that are no longer current."""
        ...

    async def delivered(self, token: str) -> None:
        """Tell that the record of a lease is with the data ranks; nobody has to renew it any more."""
        ...

    async def give_back(self, token: str, reason: RequeueReason, message: str) -> None:
        """Return a lease; a token that is no longer current is ignored."""
        ...


class HubLeases:
    """The `LeaseSource` of a run: calls of the runner's hub."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        """`call` is `Worker.hub_call`."""
        self._call = call

    async def lease_groups(self, want: int, seconds: float, version: int) -> Sequence[PromptLease]:
        """Ask for groups; see `LeaseSource`."""
        found: Sequence[PromptLease] = await self._call(
            "lease_groups", want, seconds, version, timeout=seconds + ANSWER_MARGIN_S
        )
        return found

    async def renew(self, tokens: Sequence[str]) -> Sequence[str]:
        """Renew leases; see `LeaseSource`."""
        stale: Sequence[str] = await self._call("renew", list(tokens))
        return stale

    async def delivered(self, token: str) -> None:
        """Tell of a record; see `LeaseSource`."""
        await self._call("delivered", token)

    async def give_back(self, token: str, reason: RequeueReason, message: str) -> None:
        """Return a lease; see `LeaseSource`."""
        await self._call("give_back", token, reason, message)


class Renewal:
    """Keeps the leases that are held alive. Touched on one event loop only."""

    def __init__(self, source: LeaseSource, lost: Callable[[str], None]) -> None:
        """`lost(token)` hears that the runner counts a held lease no longer: somebody else may have its group."""
        self._source = source
        self._lost = lost
        self._seconds: dict[str, float] = {}
        """Held tokens and how long each lease runs."""
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        """The last failure, so that the same one is logged once."""

    def hold(self, lease: PromptLease) -> None:
        """Renew `lease` from now on."""
        self._seconds[lease.token] = lease.lease_seconds
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def drop(self, token: str) -> None:
        """Renew `token` no more."""
        self._seconds.pop(token, None)

    def close(self) -> None:
        """Renew nothing more."""
        self._seconds.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        pause = self._interval()
        while self._seconds:
            await asyncio.sleep(pause)
            pause = self._interval() if await self._renew() else min(RETRY_SECONDS, self._interval())

    def _interval(self) -> float:
        return min(self._seconds.values(), default=0.0) / RENEWALS_PER_LEASE

    async def _renew(self) -> bool:
        """Renew once; return whether the runner answered."""
        if not self._seconds:
            return True
        try:
            stale = await self._source.renew(list(self._seconds))
        except RLJobError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("leases cannot be renewed: %s", error)
            return False
        self._complaint = ""
        for token in stale:
            if token in self._seconds:
                self.drop(token)
                self._lost(token)
        return True
