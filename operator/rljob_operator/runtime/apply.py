"""Carries out a Plan: the only place where a reconcile touches the cluster.

Order: status (the intent), events, deletions, supporting objects, the Secret, pods, control calls, the number of rollouts. A status that
meets a newer object ends the application, since the rest was decided on old facts. Events come right after the status that they tell of:
once it is written no later look makes them again. Every answer goes into the cache at once, so that the next reconcile
sees what this one did. Nothing here decides: a name that is taken or a create that is refused is noted in the job's memory, and
`reconcile` makes words of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_operator import kinds
from rljob_operator.errors import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, NotFound
from rljob_operator.kinds import Kind
from rljob_operator.model import ControlCall, Deletion, JobEvent, Object, Plan, Scale
from rljob_operator.naming import ANNOTATION_MANIFEST_HASH, LABEL_JOB, LABEL_JOB_UID
from rljob_operator.naming import secret as secret_name
from rljob_operator.runtime import status_patch
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.master_key import UnknownKey
from rljob_operator.runtime.memory import BackOff, JobMemory

logger = logging.getLogger(__name__)

EARLIER_JOB_PAUSE = 1.0
"""Seconds until we look again whether an earlier job's object has left its name."""


class Runner(Protocol):
    """Sends control calls to a job's runner; implemented by `progress.RunnerClient`."""

    async def call(self, job_uid: str, call: ControlCall) -> str:
        """Send the call; return the words of a runner that refused it, else "". Never raises for a runner that does not answer."""


class Recorder(Protocol):
    """Takes Kubernetes events; implemented by `events.EventRecorder`."""

    def record(self, job: Object, event: JobEvent) -> None:
        """Queue an event about the job; returns at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """How far an application came."""

    again_after: float | None = None
    """Seconds until the job should be looked at again because of it; 0 = at once."""
    stale: bool = False
    """Whether it ended at the status, because the job is newer than the cache knew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """One plan on its way: the job it was made for and what is remembered about it."""

    key: JobKey
    job: Object
    plan: Plan
    memory: JobMemory
    progress_interval: float
    """Least seconds between two progress writes of one job."""

    @property
    def uid(self) -> str:
        """The job's uid."""
        return str(self.job["metadata"]["uid"])


class Applier:
    """Applies plans over one cluster and cache."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        slots: FairSlots[JobKey],
        recorder: Recorder,
        runner: Runner,
        build_secret: Callable[[Object], Object],
        secret_seconds: float = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._slots = slots
        self._recorder = recorder
        self._runner = runner
        self._build_secret = build_secret
        self._secret_seconds = secret_seconds
        self._clock = clock

    async def apply(self, work: Application) -> Applied:
        """Carry out the plan; raises ApiError for failures that pass, to be retried by the queue."""
        pauses: list[float] = []
        if work.plan.status is not None:
            written = await self._write_status(work, pauses)
            if not written:
                return Applied(again_after=0.0, stale=True)
        for event in work.plan.events:
            self._recorder.record(work.job, event)
        pauses += await self._each(work.plan.delete, lambda deletion: self._delete(work, deletion))
        pauses += await self._each(work.plan.ensure, lambda obj: self._ensure(work, obj))
        await self._assert_secret(work)
        pauses += await self._each(work.plan.create, lambda pod: self._create(work, pod))
        pauses += await self._each(work.plan.calls, lambda call: self._call(work, call))
        if work.plan.scale is not None:
            pauses.append(await self._scale(work, work.plan.scale))
        if work.plan.requeue_after is not None:
            pauses.append(work.plan.requeue_after)
        return Applied(again_after=min(pauses, default=None))

    async def _each(self, items: Iterable[Any], effect: Callable[[Any], Awaitable[Any]]) -> list[float]:
        """Run an effect for all items at once; all are tried, then the first failure is raised. Returns the pauses they ask for."""
        results = await asyncio.gather(*(effect(item) for item in items), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, float)]

    async def _call(self, work: Application, call: ControlCall) -> float | None:
        """Send a control call; note a changed spec that the runner refuses, and return 0 when that is news to tell of.

        The first words about a spec are kept: a runner that words each refusal anew must not cause a write each time.
        """
        words = await self._runner.call(work.uid, call)
        if call.method != "PUT /control":
            return None
        before, generation = work.memory.refused_change, call.body["generation"]
        if words and before is not None and before[0] == generation:
            return None
        work.memory.refused_change = (generation, words) if words else None
        return 0.0 if work.memory.refused_change != before else None

    async def _scale(self, work: Application, scale: Scale) -> float:
        """Set the number of rollouts as `kubectl scale` does and tell of it; return the seconds until the next look.

        The version that is known now is the one our own status write left. Where the spec was edited since the decision nothing is
        written, and the API server refuses the same for an edit that we have not seen yet.
        """
        now, job = self._clock(), self._cache.job(work.key)
        if job is None or job["metadata"].get("generation") != scale.generation:
            return 0.0
        if (pause := work.memory.scaling.left(now)) > 0:
            return pause
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "spec": {"replicas": scale.replicas}}
        try:
            await self._cluster.patch(kinds.RLJOB, work.key.namespace, work.key.name, body, subresource="scale")
        except (Forbidden, Invalid) as error:  # rights of an earlier chart, a policy of the cluster, a bound of the job
            pause = work.memory.scaling.failed(now)
            words = f"{scale.event.message}; it was refused: {error.message}"
            self._recorder.record(job, JobEvent(type="Warning", reason="AutoscaleRefused", message=words))
            return pause
        except (Conflict, NotFound):
            pass
        else:
            work.memory.scaling = BackOff()
            self._recorder.record(job, scale.event)
        await self._reread_job(work.key)
        return 0.0

    async def _write_status(self, work: Application, pauses: list[float]) -> bool:
        """Write the status, unless it is progress whose time has not come; return False when the job is newer or gone."""
        now = self._clock()
        if work.plan.progress_only:
            wait = work.memory.progress_written + work.progress_interval - now
            if wait > 0:
                pauses.append(wait)
                return True
        difference = status_patch.difference(work.job.get("status") or {}, work.plan.status or {})
        if not difference:
            return True
        meta = work.job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}, "status": difference}
        try:
            answer = await self._cluster.patch(
                kinds.RLJOB, work.key.namespace, work.key.name, body, subresource="status"
            )
        except Conflict:
            await self._reread_job(work.key)
            return False
        except NotFound:
            self._cache.drop(kinds.RLJOB, work.job)
            return False
        self._cache.put(kinds.RLJOB, answer)
        if work.plan.progress_only:
            work.memory.progress_written = now
        return True

    async def _reread_job(self, key: JobKey) -> None:
        try:
            self._cache.put(kinds.RLJOB, await self._cluster.read(kinds.RLJOB, key.namespace, key.name))
        except NotFound:
            job = self._cache.job(key)
            if job is not None:
                self._cache.drop(kinds.RLJOB, job)

    async def _delete(self, work: Application, deletion: Deletion) -> float:
        """Delete an object; gone already is as good.

        Returns 0 when that changed what is there, since the job must be looked at without it, else the pause before the next try: a
        finalizer may hold an object for ever.
        """
        kind, now = kinds.by_name(deletion.kind), self._clock()
        back_off = work.memory.delete_backoff.get(deletion.uid)
        if back_off is not None and (pause := back_off.left(now)) > 0:
            return pause
        try:
            answer = await self._cluster.delete(
                kind, work.key.namespace, deletion.name, uid=deletion.uid, grace_seconds=deletion.grace_seconds
            )
        except (NotFound, Conflict):  # Conflict: the name has another uid, so ours is gone
            gone = changed = True
        except Forbidden as error:
            if deletion.kind != kinds.CLAIM_TEMPLATE.kind:
                raise
            # A chart before this operator's gives no right to it; the template goes with the job.
            logger.warning("ResourceClaimTemplate %s was not deleted: %s", deletion.name, error.message)
            gone = changed = False
        else:
            gone = _is_gone(answer)
            changed = answer.get("kind") == kind.kind and self._cache.put(kind, answer) is not None
        if gone:
            self._cache.drop_uid(kind, work.key, deletion.name, deletion.uid)
        if gone or changed:
            work.memory.delete_backoff.pop(deletion.uid, None)
            return 0.0
        return work.memory.delete_backoff.setdefault(deletion.uid, BackOff()).failed(now)

    async def _ensure(self, work: Application, obj: Object) -> float | None:
        """Apply a supporting object; return a pause when an earlier job's or someone else's holds the name."""
        kind = kinds.of(obj["apiVersion"], obj["kind"])
        name = obj["metadata"]["name"]
        label, manifest = f"{kind.kind}/{name}", manifest_hash(obj)
        if (pause := work.memory.pause(label, now=self._clock(), manifest=manifest)) > 0:
            return pause
        async with self._slots.hold(work.key):
            if self._cache.entry(kind, work.key, name) is None:
                taken = await self._look_before(work, kind, name)
                if taken is not None:
                    return taken
            try:
                answer = await self._cluster.apply(kind, work.key.namespace, name, obj)
            except (Forbidden, Invalid, NotFound) as error:
                return self._refused(work, label, error, manifest=manifest)
        self._cache.put(kind, answer)
        work.memory.clear(label)
        return None

    async def _look_before(self, work: Application, kind: Kind, name: str) -> float | None:
        """Read who holds the name of an object the cache does not know; None = nobody, or we do."""
        try:
            holder = await self._cluster.read(kind, work.key.namespace, name)
        except NotFound:
            return None
        return self._meet_holder(work, kind, holder)

    async def _assert_secret(self, work: Application) -> None:
        """Create the Secret before pods need it, and now and then; 409 means that it is there, since its name carries the uid."""
        now, memory = self._clock(), work.memory
        if memory.secret_due is None:  # a new operator finds the jobs as they are: no burst of requests
            memory.secret_due = now + random.uniform(0.1, 1.0) * self._secret_seconds
        if not work.plan.ensure_secret or (not work.plan.create and now < memory.secret_due):
            return
        label = f"Secret/{secret_name(work.key.name, work.uid)}"
        try:
            await self._cluster.create(kinds.SECRET, work.key.namespace, self._build_secret(work.job))
        except AlreadyExists:
            memory.clear(label)
        except (Forbidden, Invalid, UnknownKey) as error:
            self._refused(work, label, error)
        else:
            memory.clear(label)
        memory.secret_due = now + self._secret_seconds

    async def _create(self, work: Application, pod: Mapping[str, Any]) -> float | None:
        """Create a pod; return 0 when the job must be looked at with what came of it, else a pause or None."""
        name = pod["metadata"]["name"]
        label = f"Pod/{name}"
        if (pause := work.memory.pause(label, now=self._clock())) > 0:
            return pause
        async with self._slots.hold(work.key):
            try:
                answer = await self._cluster.create(kinds.POD, work.key.namespace, pod)
            except AlreadyExists:
                return await self._read_holder(work, kinds.POD, name)
            except (Forbidden, Invalid) as error:
                return self._refused(work, label, error)
        self._cache.put(kinds.POD, answer)
        work.memory.clear(label)
        return 0.0

    async def _read_holder(self, work: Application, kind: Kind, name: str) -> float:
        """Read who holds a name that met 409: ours is adopted by the look at it."""
        try:
            holder = await self._cluster.read(kind, work.key.namespace, name)
        except NotFound:
            return 0.0
        return self._meet_holder(work, kind, holder) or 0.0

    def _meet_holder(self, work: Application, kind: Kind, holder: Mapping[str, Any]) -> float | None:
        """Judge the object that holds a name we need: ours (None), an earlier job's or someone else's (a pause)."""
        meta = holder["metadata"]
        label = f"{kind.kind}/{meta['name']}"
        labels = meta.get("labels") or {}
        if labels.get(LABEL_JOB) != work.key.name or LABEL_JOB_UID not in labels:
            news = label not in work.memory.name_conflicts
            work.memory.name_conflicts.add(label)
            return 0.0 if news else EARLIER_JOB_PAUSE
        self._cache.put(kind, holder)
        work.memory.clear(label)
        return None if labels[LABEL_JOB_UID] == work.uid else EARLIER_JOB_PAUSE

    def _refused(self, work: Application, label: str, error: ApiError, *, manifest: str = "") -> float:
        """Note a refusal for `reconcile` to tell of; return 0 when it is news, else the pause before the next try."""
        now = self._clock()
        if work.memory.refuse(label, error.message, now=now, manifest=manifest):
            logger.warning("%s was refused: %s", label, error.message)
            return 0.0
        return work.memory.pause(label, now=now, manifest=manifest)


def manifest_hash(obj: Mapping[str, Any]) -> str:
    """Return the hash that tells a supporting object's content; empty for one without."""
    return str((obj["metadata"].get("annotations") or {}).get(ANNOTATION_MANIFEST_HASH, ""))


def _is_gone(answer: Mapping[str, Any]) -> bool:
    """Whether a deletion's answer says that nothing is left: no grace to wait for and no finalizer."""
    meta = answer.get("metadata") or {}
    return answer.get("kind") != "Status" and meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")
