"""Writes Kubernetes events about jobs, which `kubectl describe` shows. Equal events are merged into one with a count.

Recording never blocks a reconcile or makes it fail. Each job may write a burst of events, then one per REFILL_SECONDS. Events that exceed
this are dropped and counted in the metrics.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_operator import kinds
from rljob_operator.errors import ApiError, NotFound
from rljob_operator.model import JobEvent, Object
from rljob_operator.runtime.cluster import Cluster

logger = logging.getLogger(__name__)

COMPONENT = "rljob-operator"
REMEMBERED = 4096
"""Number of events whose count is kept; the count of older ones starts again at 1."""
WAITING = 2000
BURST = 25.0
REFILL_SECONDS = 60.0
"""Seconds after which a job may write one more event, once its burst is used up."""
LONGEST_MESSAGE = 1024


@dataclass(slots=True)
class _Known:
    name: str
    count: int
    sent: int
    first: str


@dataclass(slots=True)
class _Budget:
    tokens: float
    at: float


class EventRecorder:
    """Queues events and writes them in the background."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        identity: str,
        dropped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._dropped = dropped
        self._clock = clock
        self._series: OrderedDict[tuple[str, JobEvent], _Known] = OrderedDict()
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()
        self._waiting: OrderedDict[tuple[str, JobEvent], Mapping[str, Any]] = OrderedDict()
        """Notes to write and the job's metadata; a note that waits is counted up, not queued twice."""
        self._wake = asyncio.Event()

    def record(self, job: Object, event: JobEvent) -> None:
        """Queue an event about the job; returns at once."""
        uid = job["metadata"]["uid"]
        if not self._allowed(uid) or len(self._waiting) >= WAITING:
            self._dropped()
            return
        key = (uid, event)
        series = self._series.get(key)
        if series is None:
            now = self._clock()
            name = f"{job['metadata']['name'][:200]}.{int(now * 1e6):x}{secrets.token_hex(2)}"
            series = self._series[key] = _Known(name=name, count=0, sent=0, first=_stamp(now))
        series.count += 1
        self._series.move_to_end(key)
        while len(self._series) > REMEMBERED:
            self._series.popitem(last=False)
        self._waiting[key] = job["metadata"]
        self._wake.set()

    async def run(self) -> None:
        """Write the queued events until cancelled."""
        while True:
            while self._waiting:
                key, meta = self._waiting.popitem(last=False)
                try:
                    await self._write(key, meta)
                except ApiError as error:
                    self._dropped()
                    logger.info(
                        "event %s of %s/%s was not written: %s", key[1].reason, meta["namespace"], meta["name"], error
                    )
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, key: tuple[str, JobEvent], meta: Mapping[str, Any]) -> None:
        series = self._series.get(key)
        if series is None:  # The event was removed in favour of newer ones.
            return
        count, namespace = series.count, meta["namespace"]
        if series.sent:
            try:
                body = {"count": count, "lastTimestamp": _stamp(self._clock())}
                await self._cluster.patch(kinds.EVENT, namespace, series.name, body)
                series.sent = count
                return
            except NotFound:  # The API server deletes events after an hour.
                pass
        await self._cluster.create(kinds.EVENT, namespace, self._body(key, meta, series))
        series.sent = count

    def _body(self, key: tuple[str, JobEvent], meta: Mapping[str, Any], series: _Known) -> dict[str, Any]:
        uid, event = key
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": kinds.RLJOB.api_version,
                "kind": kinds.RLJOB.kind,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:LONGEST_MESSAGE],
            "count": series.count,
            "firstTimestamp": series.first,
            "lastTimestamp": _stamp(self._clock()),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._identity[:128],
        }

    def _allowed(self, uid: str) -> bool:
        """Return whether the job may write an event now, and count it. One event per REFILL_SECONDS is added to its budget."""
        now = self._clock()
        budget = self._budgets.pop(uid, None) or _Budget(BURST, now)
        budget.tokens = min(BURST, budget.tokens + (now - budget.at) / REFILL_SECONDS)
        budget.at = now
        self._budgets[uid] = budget
        while len(self._budgets) > REMEMBERED:
            self._budgets.popitem(last=False)
        if budget.tokens < 1.0:
            return False
        budget.tokens -= 1.0
        return True


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
