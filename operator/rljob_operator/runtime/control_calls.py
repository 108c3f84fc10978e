"""Sends control calls to runners, outside the workers of the queue.

A runner may be a program of a tenant that accepts a connection and never answers. A call to it takes until its deadline. The workers of the
queue therefore only hand the calls of a plan over. One task per job sends them, and the jobs of one namespace send at most PER_NAMESPACE at
the same time, so that hanging runners delay neither the reconciles of other jobs nor the calls of other namespaces.

A plan contains its calls as long as they are needed. Calls that were not sent yet are replaced by those of the next plan, and lost ones are
not repeated here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from rljob_operator.model import ControlCall
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.fairness import FairSlots

logger = logging.getLogger(__name__)

IN_FLIGHT, PER_NAMESPACE = 32, 4
"""Most jobs, in all and per namespace, that send calls at the same time."""


class Client(Protocol):
    """Sends one control call; implemented by `progress.RunnerClient`."""

    async def call(self, job_uid: str, call: ControlCall) -> str:
        """Send the call; return the message of a runner that refused it, else "". A runner that does not answer raises nothing."""


Answered = Callable[[JobKey, str, ControlCall, str], None]
"""Called after each call with the job, its uid, the call and the message of a runner that refused it, else ""."""


class ControlCalls:
    """Queues the control calls of jobs and sends them in the background."""

    def __init__(self, *, client: Client, answered: Answered) -> None:
        self._client = client
        self._on_answer = answered
        self._slots: FairSlots[str] = FairSlots(total=IN_FLIGHT, per_key=PER_NAMESPACE)
        self._waiting: dict[JobKey, tuple[str, Sequence[ControlCall]]] = {}
        """Job uid and calls that are not sent yet, by job."""
        self._sending: set[JobKey] = set()
        """Jobs that have a task."""
        self._wake = asyncio.Event()

    def send(self, key: JobKey, job_uid: str, calls: Sequence[ControlCall]) -> None:
        """Queue the calls of the newest plan of a job in place of those that were not sent yet; returns at once."""
        if not calls:
            self._waiting.pop(key, None)
            return
        self._waiting[key] = job_uid, calls
        self._wake.set()

    async def run(self) -> None:
        """Send the queued calls until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for key in self._waiting.keys() - self._sending:
                    self._sending.add(key)
                    group.create_task(self._send(key), name=f"calls {key}")
                self._wake.clear()
                await self._wake.wait()

    async def _send(self, key: JobKey) -> None:
        try:
            async with self._slots.hold(key.namespace):
                job_uid, calls = self._waiting.pop(key, ("", ()))
                for call in calls:
                    self._on_answer(key, job_uid, call, await self._client.call(job_uid, call))
        # An exception must not leave the task: it would end the calls of all jobs, and the leader with them.
        except Exception:
            logger.exception("control calls of %s failed", key)
        finally:
            self._sending.discard(key)
            self._wake.set()
