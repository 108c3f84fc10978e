"""Leader election by a `coordination.k8s.io` Lease, which one replica holds and the others watch.

Only the clock of this process is used: a standby measures the time since it last saw the Lease change, and ignores the times written in it.
The holder stops acting when it could not renew the Lease for two thirds of its duration; the others wait for the whole duration. In the
third between the two, no replica acts.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from typing import Any

from rljob_operator import kinds
from rljob_operator.errors import AlreadyExists, ApiError, Conflict, NotFound
from rljob_operator.runtime.cluster import Cluster

logger = logging.getLogger(__name__)

NAME = "rljob-operator"


class LeaseLost(RuntimeError):
    """This replica is no longer the leader. It must end, because another one may act."""


class Leadership:
    """Acquires, renews and releases the Lease for one replica."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        namespace: str,
        identity: str,
        duration: float = 15.0,
        name: str = NAME,
        on_change: Callable[[bool], None] = lambda leading: None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._duration = duration
        self._name = name
        self._on_change = on_change
        self._last_seen: tuple[str, str] = ("", "")
        """Holder and renewal time last read."""
        self._seen_at = 0.0
        self._lease: dict[str, Any] | None = None
        """The Lease as we wrote it last; None while we do not hold it."""
        self._held_since = 0.0
        """Loop time just before the request that wrote it. The others count from the write itself, which may be long before its answer."""

    async def acquire(self) -> None:
        """Return when this replica holds the Lease with enough time left to act."""
        loop = asyncio.get_running_loop()
        while True:
            self._held_since = loop.time()
            if await self._try_acquire():
                if loop.time() < self._held_since + self._duration * 2 / 3:
                    break
                logger.warning("the Lease was taken, but the answer came too late to act on it; trying again")
                self._lease = None
                continue
            await asyncio.sleep(self._duration / 5)
        logger.info("holding the Lease %s/%s as %s", self._namespace, self._name, self._identity)
        self._on_change(True)

    async def keep(self) -> None:
        """Renew the Lease until cancelled. Raises LeaseLost if another replica holds it or renewals have failed for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(self._held_since + self._duration / 3 - loop.time(), 0.0))
            try:
                async with asyncio.timeout_at(self._held_since + self._duration * 2 / 3):
                    self._held_since = await self._renew_until_done()
            except TimeoutError as error:
                self._lose()
                silence = loop.time() - self._held_since
                raise LeaseLost(f"Lease {self._name} could not be renewed for {silence:.1f} s") from error

    async def release(self) -> None:
        """Release the Lease, so that a standby need not wait until it expires. A failure is ignored; the Lease then expires."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._on_change(False)
        try:
            await self._give_back(lease)
        except Conflict:  # A renewal was in progress when this replica was asked to stop.
            await self._give_back_newest()
        except ApiError as error:
            logger.info("the Lease could not be given back: %s", error)

    async def _give_back(self, lease: dict[str, Any]) -> None:
        body = {**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        await self._cluster.replace(kinds.LEASE, self._namespace, self._name, body)

    async def _give_back_newest(self) -> None:
        try:
            lease = await self._cluster.read(kinds.LEASE, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                await self._give_back(lease)
        except ApiError as error:
            logger.info("the Lease could not be given back: %s", error)

    async def _renew_until_done(self) -> float:
        """Renew the Lease, retrying while the API server does not answer; return the loop time, in seconds, at which the renewal began."""
        loop = asyncio.get_running_loop()
        while True:
            start = loop.time()
            try:
                await self._renew()
                return start
            except LeaseLost:
                self._lose()
                raise
            except ApiError as error:
                logger.warning("renewing the Lease failed: %s", error)
                await asyncio.sleep(min(1.0, self._duration / 10))

    async def _renew(self) -> None:
        assert self._lease is not None
        body = {**self._lease, "spec": {**self._lease["spec"], "renewTime": _now()}}
        try:
            self._lease = await self._cluster.replace(kinds.LEASE, self._namespace, self._name, body)
        except Conflict:
            lease = await self._cluster.read(kinds.LEASE, self._namespace, self._name)
            holder = (lease.get("spec") or {}).get("holderIdentity")
            if holder != self._identity:
                raise LeaseLost(f"Lease {self._name} is held by {holder!r}") from None
            # This replica wrote it earlier, and the answer was lost. The time of that write is unknown, so it is repeated.
            self._lease = lease
            await self._renew()
        except NotFound:
            self._lease = await self._create(transitions=0)

    async def _try_acquire(self) -> bool:
        try:
            lease = await self._cluster.read(kinds.LEASE, self._namespace, self._name)
        except NotFound:
            return await self._first()
        except ApiError as error:
            logger.warning("reading the Lease failed: %s", error)
            return False
        return await self._take_over(lease)

    async def _first(self) -> bool:
        try:
            self._lease = await self._create(transitions=0)
        except AlreadyExists:
            return False
        except ApiError as error:
            logger.warning("creating the Lease failed: %s", error)
            return False
        return True

    async def _take_over(self, lease: dict[str, Any]) -> bool:
        """Take the Lease when it is free, ours, or was not renewed for its whole duration as we saw it."""
        spec = lease.get("spec") or {}
        holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        now = asyncio.get_running_loop().time()
        if (holder, renewed) != self._last_seen:
            self._last_seen, self._seen_at = (holder, renewed), now
        patience = float(spec.get("leaseDurationSeconds") or self._duration)
        if holder and holder != self._identity and now - self._seen_at < patience:
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
        body = {**lease, "spec": self._spec(transitions=transitions)}
        try:
            self._lease = await self._cluster.replace(kinds.LEASE, self._namespace, self._name, body)
        except ApiError as error:  # A Conflict means that another replica was faster.
            logger.info("the Lease could not be taken: %s", error)
            return False
        return True

    async def _create(self, *, transitions: int) -> dict[str, Any]:
        body = {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec(transitions=transitions),
        }
        return await self._cluster.create(kinds.LEASE, self._namespace, body)

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = _now()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration)),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _lose(self) -> None:
        self._lease = None
        self._on_change(False)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
