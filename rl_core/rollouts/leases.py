"""The leases of a rollout: the calls by which it gets, renews and ends them, and the renewal of those that it holds.

The runner's ledger alone knows which rollout holds which group. A lease that is not renewed ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason

logger = logging.getLogger(__name__)
ANSWER_MARGIN_S = 10.0
"""Seconds after the end of a poll after which its answer counts as lost."""
RENEWALS_PER_LEASE = 3
RETRY_SECONDS = 1.0
"""Pause before a renewal that failed is tried again."""


class HubLeases:
    """The lease calls of the runner's hub. All of them raise RLJobError when the runner does not answer."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        """`call` is `Worker.hub_call`."""
        self._call = call

    async def lease_groups(self, max_groups: int, timeout: float, version: int) -> Sequence[PromptLease]:
        """Return up to `max_groups` leases for weights of `version` once groups are available, or none after `timeout` seconds."""
        leases: Sequence[PromptLease] = await self._call(
            "lease_groups", max_groups, timeout, version, timeout=timeout + ANSWER_MARGIN_S
        )
        return leases

    async def renew(self, tokens: Sequence[str]) -> Sequence[str]:
        """Let the leases of `tokens` run anew; return those that are no longer current."""
        stale: Sequence[str] = await self._call("renew", list(tokens))
        return stale

    async def finish(self, entry: GroupEntry) -> None:
        """Report a group whose record is stored; may be repeated. Nobody has to renew its lease any more."""
        await self._call("finish", entry)

    async def return_group(self, token: str, reason: RequeueReason, message: str) -> None:
        """Return a lease; a token that is no longer current is ignored."""
        await self._call("return_group", token, reason, message)


class Renewal:
    """Renews the leases that the rollout holds. Used on one event loop only."""

    def __init__(self, leases: HubLeases, lost: Callable[[str], None]) -> None:
        """`lost(token)` is called when the runner no longer counts a held lease: another rollout may have its group."""
        self._leases = leases
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
        """Stop renewing `token`."""
        self._seconds.pop(token, None)

    def close(self) -> None:
        """Stop renewing all leases."""
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
            stale = await self._leases.renew(list(self._seconds))
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
