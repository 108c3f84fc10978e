"""The leases of a rollout worker: calls that get, renew and end them, and a task that renews those in use.

A lease is the right to generate one prompt group for a limited time. It ends by itself when it is not renewed. Only the runner's ledger
knows which rollout holds which group. The id of a lease is called its token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason
from rl_core.messages.samples import KeptSample

logger = logging.getLogger(__name__)
ANSWER_MARGIN_S = 10.0
"""Seconds after the end of a poll at which its answer counts as lost."""
RENEWALS_PER_LEASE = 3
RETRY_SECONDS = 1.0
"""Pause before a renewal that failed is tried again."""


class HubLeases:
    """The lease methods of the runner's hub. All raise RLJobError when the runner does not answer."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        """`call` is `Worker.hub_call`."""
        self._call = call

    async def lease_groups(self, max_groups: int, timeout: float, version: int) -> Sequence[PromptLease]:
        """Return up to `max_groups` leases of groups that are to be generated with weights `version`.

        Waits up to `timeout` seconds until a group is available; returns none then.
        """
        leases: Sequence[PromptLease] = await self._call(
            "lease_groups", max_groups, timeout, version, timeout=timeout + ANSWER_MARGIN_S
        )
        return leases

    async def renew(self, tokens: Sequence[str]) -> Sequence[str]:
        """Restart the time limit of the leases `tokens`; return those that have expired or were revoked."""
        stale: Sequence[str] = await self._call("renew", list(tokens))
        return stale

    async def finish(self, entry: GroupEntry) -> None:
        """Report a group whose record is stored, which ends its lease. May be repeated."""
        await self._call("finish", entry)

    async def return_group(
        self, token: str, reason: RequeueReason, message: str, failed: KeptSample | None = None
    ) -> None:
        """Return the unfinished group of the lease `token` to the runner, with the sample that failed. A lease that has ended is ignored."""
        await self._call("return_group", token, reason, message, failed)


class Renewal:
    """Renews the leases in use. It belongs to one event loop."""

    def __init__(self, leases: HubLeases, lost: Callable[[str], None]) -> None:
        """Renew through `leases`.

        `lost(token)` is called when a lease has ended at the runner; another rollout may then get its group.
        """
        self._leases = leases
        self._on_lost = lost
        self._seconds: dict[str, float] = {}
        """Held tokens and how long each lease runs."""
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        """The last failure, so that the same one is logged once."""

    def hold(self, lease: PromptLease) -> None:
        """Renew `lease` until `drop` or `close`."""
        self._seconds[lease.token] = lease.lease_seconds
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def drop(self, token: str) -> None:
        """Stop renewing the lease `token`."""
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
                self._on_lost(token)
        return True
