"""Applies a Plan to the cluster. No other part of a reconcile writes to the API server.

The order is: status (the intent), events, deletions, supporting objects, the Secret, pods, control calls, the number of rollouts. When the
status write meets a newer object, the application ends, because the rest of the plan was decided on outdated state. A status that the API
server refuses stops nothing: the memory of the job keeps it, the next reconcile decides from it, and it is sent again with a back-off. Events
follow the status write directly, because no later reconcile produces them again. Control calls are only handed over (control_calls.py). Every
answer is put into the cache at once, so the next reconcile sees the effects of this one. This module decides nothing: it records name
conflicts and refused creates in the memory of the job, and `reconcile` reports them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_operator import kinds
from rljob_operator.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooManyRequests,
    Unavailable,
)
from rljob_operator.kinds import Kind
from rljob_operator.manifests import network
from rljob_operator.model import ControlCall, Deletion, JobEvent, Object, Plan, Scale
from rljob_operator.naming import ANNOTATION_MANIFEST_HASH, LABEL_JOB, LABEL_JOB_UID
from rljob_operator.naming import secret as secret_name
from rljob_operator.runtime import status_patch
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.master_key import UnknownKey
from rljob_operator.runtime.memory import JobMemory, request_backoff

logger = logging.getLogger(__name__)

EARLIER_JOB_PAUSE = 1.0
"""Seconds between two checks whether the object of an earlier job with this name is deleted."""
RULES_CHANGED = (
    "the API server stored other rules than those that were applied, and no pod is created under them; exempt the network policies of "
    "rljob from the admission webhook or policy that changes them"
)


class Calls(Protocol):
    """Sends control calls to the runners of jobs; implemented by `control_calls.ControlCalls`."""

    def send(self, key: JobKey, job_uid: str, calls: Sequence[ControlCall]) -> None:
        """Queue the calls of the newest plan of a job; returns at once."""


class Recorder(Protocol):
    """Records Kubernetes events; implemented by `events.EventRecorder`."""

    def record(self, job: Object, event: JobEvent) -> None:
        """Queue an event about the job; returns at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The result of an application."""

    again_after: float | None = None
    """Seconds until the job should be reconciled again because of it; 0 = at once, None = no need."""
    stale: bool = False
    """Whether it ended at the status write, because the job is newer than the cached one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """A plan with the job that it was made for and the memory of that job."""

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
        calls: Calls,
        build_secret: Callable[[Object], Object],
        secret_seconds: float = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._slots = slots
        self._recorder = recorder
        self._calls = calls
        self._build_secret = build_secret
        self._secret_seconds = secret_seconds
        self._clock = clock

    async def apply(self, work: Application) -> Applied:
        """Apply the plan. Raises ApiError for transient failures, which the queue retries."""
        pauses: list[float] = []
        if not await self._write_status(work, pauses):
            return Applied(again_after=0.0, stale=True)
        for event in work.plan.events:
            self._recorder.record(work.job, event)
        pauses += await self._each(work.plan.delete, lambda deletion: self._delete(work, deletion))
        pauses += await self._each(work.plan.ensure, lambda obj: self._ensure(work, obj))
        # Pods must not join another owner's gang, or be reached by another owner's Service.
        pods = work.plan.create if self._isolated(work) and not work.memory.name_conflicts else ()
        if (pause := await self._assert_secret(work, needed=bool(pods))) is not None:
            pauses.append(pause)
        pauses += await self._each(pods, lambda pod: self._create(work, pod))
        self._calls.send(work.key, work.uid, work.plan.calls)
        if work.plan.scale is not None:
            pauses.append(await self._scale(work, work.plan.scale))
        if work.plan.requeue_after is not None:
            pauses.append(work.plan.requeue_after)
        return Applied(again_after=min(pauses, default=None))

    async def _each(self, items: Iterable[Any], effect: Callable[[Any], Awaitable[Any]]) -> list[float]:
        """Run `effect` for all items concurrently and return the pauses they ask for. All are tried before the first failure is raised."""
        results = await asyncio.gather(*(effect(item) for item in items), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, float)]

    async def _scale(self, work: Application, scale: Scale) -> float:
        """Set the number of rollouts through the scale subresource and record an event; return the seconds until the next reconcile.

        The cached resourceVersion is that of our own status write. Nothing is written when the spec was edited since the decision. The
        API server refuses the write when there is an edit that the cache does not hold yet.
        """
        now, job = self._clock(), self._cache.job(work.key)
        if job is None or job["metadata"].get("generation") != scale.generation:
            return 0.0
        if (pause := work.memory.scaling.remaining(now)) > 0:
            return pause
        meta = job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "spec": {"replicas": scale.replicas}}
        try:
            await self._cluster.patch(kinds.RLJOB, work.key.namespace, work.key.name, body, subresource="scale")
        except (Forbidden, Invalid) as error:
            # Rights are missing (an earlier chart), or a policy of the cluster or a bound of the job forbids it.
            pause = work.memory.scaling.step(now)
            message = f"{scale.event.message}; it was refused: {error.message}"
            self._recorder.record(job, JobEvent(type="Warning", reason="AutoscaleRefused", message=message))
            return pause
        except (Conflict, NotFound):
            pass
        else:
            work.memory.scaling = request_backoff()
            self._recorder.record(job, scale.event)
        await self._reread_job(work.key)
        return 0.0

    async def _write_status(self, work: Application, pauses: list[float]) -> bool:
        """Write the status of the plan, or the one that was refused before.

        Nothing is written if there is none, if it is unchanged, if it holds only progress that is not due yet, or during the back-off after a
        refusal. In the last two cases, and after a refusal, `pauses` gets the seconds until the next attempt. Returns False, which ends the
        application, if the job was changed or deleted meanwhile. Raises TooManyRequests and Unavailable.
        """
        now, memory = self._clock(), work.memory
        status = memory.refused_status if work.plan.status is None else work.plan.status
        if status is None:
            return True
        if work.plan.progress_only:
            wait = memory.progress_written + work.progress_interval - now
            if wait > 0:
                pauses.append(wait)
                return True
        difference = status_patch.difference(work.job.get("status") or {}, status)
        if not difference:
            memory.record_written_status()
            return True
        if (pause := memory.status_backoff.remaining(now)) > 0:
            memory.refused_status = status
            pauses.append(pause)
            return True
        meta = work.job["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}, "status": difference}
        try:
            answer = await self._cluster.patch(
                kinds.RLJOB, work.key.namespace, work.key.name, body, subresource="status"
            )
            self._cache.put(kinds.RLJOB, answer)
        except Conflict:
            await self._reread_job(work.key)
            if not self._is_written(work, meta, status):
                return False
        except NotFound:
            self._cache.drop(kinds.RLJOB, work.job)
            return False
        except (TooManyRequests, Unavailable):
            raise
        except ApiError as error:
            pauses.append(memory.record_refused_status(status, now=now))
            logger.warning("the status was refused: %s", error.message)
            message = f"the API server refused the status, and the job continues without it: {error.message}"
            self._recorder.record(work.job, JobEvent(type="Warning", reason="StatusRefused", message=message))
            return True
        memory.record_written_status()
        if work.plan.progress_only:
            memory.progress_written = now
        return True

    def _is_written(self, work: Application, meta: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
        """Return whether the job that was read again has exactly the status `status`, as after a write whose response was lost.

        The plan is then continued, because no later reconcile would produce its events again.
        """
        cached = self._cache.job(work.key)
        return (
            cached is not None
            and cached["metadata"]["uid"] == meta["uid"]
            and cached["metadata"].get("generation") == meta.get("generation")
            and not status_patch.difference(cached.get("status") or {}, status)
        )

    async def _reread_job(self, key: JobKey) -> None:
        read_at = self._cache.now()
        try:
            job = await self._cluster.read(kinds.RLJOB, key.namespace, key.name)
        except NotFound:
            cached = self._cache.job(key)
            if cached is not None:
                self._cache.drop(kinds.RLJOB, cached)
        else:
            self._cache.put(kinds.RLJOB, job, read_at=read_at)

    async def _delete(self, work: Application, deletion: Deletion) -> float:
        """Delete an object. An object that does not exist counts as deleted.

        Returns 0 when the deletion had an effect, because the job must be reconciled without the object. Returns the pause before the
        next attempt otherwise, because a finalizer may hold the object for ever.
        """
        kind, now = kinds.by_name(deletion.kind), self._clock()
        backoff = work.memory.delete_backoff.get(deletion.uid)
        if backoff is not None and (pause := backoff.remaining(now)) > 0:
            return pause
        try:
            answer = await self._cluster.delete(
                kind, work.key.namespace, deletion.name, uid=deletion.uid, grace_seconds=deletion.grace_seconds
            )
        except (NotFound, Conflict):  # Conflict: the name has another uid, so our object is gone
            gone = changed = True
        except Forbidden as error:
            if deletion.kind != kinds.CLAIM_TEMPLATE.kind:
                raise
            # An earlier chart does not grant this right; the template is deleted together with the job.
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
        return work.memory.delete_backoff.setdefault(deletion.uid, request_backoff()).step(now)

    async def _ensure(self, work: Application, obj: Object) -> float | None:
        """Apply a supporting object; return a pause when the name is taken by an earlier job or by somebody else."""
        kind = kinds.of(obj["apiVersion"], obj["kind"])
        name = obj["metadata"]["name"]
        label, manifest = f"{kind.kind}/{name}", manifest_hash(obj)
        now = self._clock()
        if (pause := work.memory.refusal_pause(label, now=now, manifest=manifest)) > 0:
            return pause
        if (pause := work.memory.apply_pause(label, manifest, now=now)) > 0:
            return pause
        async with self._slots.hold(work.key):
            if self._cache.entry(kind, work.key, name) is None:
                pause_for_holder = await self._check_name(work, kind, name)
                if pause_for_holder is not None:
                    return pause_for_holder
            try:
                answer = await self._cluster.apply(kind, work.key.namespace, name, obj)
            except (Forbidden, Invalid, NotFound) as error:
                return self._record_refusal(work, label, error, manifest=manifest)
        self._cache.put(kind, answer)
        if kind == kinds.NETWORK_POLICY and network.digest_of(answer) != network.digest_of(obj):
            return self._record_refusal(work, label, Invalid(RULES_CHANGED), manifest=manifest)
        work.memory.clear(label)
        if work.memory.record_apply(label, manifest, now=self._clock()):
            logger.warning("%s does not stay as it was applied: is another operator serving this namespace?", label)
        return None

    def _isolated(self, work: Application) -> bool:
        """Return whether the job's network policies exist and have the rules of the plan. Otherwise no pod may be created.

        The rules themselves are compared. Another client that edits them does not change the annotation with the manifest hash.
        """
        return all(
            (cached := self._cache.entry(kinds.NETWORK_POLICY, work.key, obj["metadata"]["name"])) is not None
            and network.digest_of(cached.value) == network.digest_of(obj)
            for obj in work.plan.ensure
            if obj["kind"] == kinds.NETWORK_POLICY.kind
        )

    async def _check_name(self, work: Application, kind: Kind, name: str) -> float | None:
        """Read the object that has a name which the cache does not hold; return None when the name is free or ours, else a pause."""
        try:
            holder = await self._cluster.read(kind, work.key.namespace, name)
        except NotFound:
            return None
        return self._adopt_or_wait(work, kind, holder)

    async def _assert_secret(self, work: Application, *, needed: bool) -> float | None:
        """Create the Secret when it is needed for new pods, and periodically; return the pause before the next attempt if it was refused.

        AlreadyExists means that it is ours, because its name has the uid.
        """
        now, memory = self._clock(), work.memory
        if memory.secret_due is None:  # Spreads the first checks of all jobs after the operator has started.
            memory.secret_due = now + random.uniform(0.1, 1.0) * self._secret_seconds
        if not work.plan.ensure_secret or (not needed and now < memory.secret_due):
            return None
        label = f"Secret/{secret_name(work.key.name, work.uid)}"
        if (pause := memory.refusal_pause(label, now=now)) > 0:
            return pause
        memory.secret_due = now + self._secret_seconds
        try:
            await self._cluster.create(kinds.SECRET, work.key.namespace, self._build_secret(work.job))
        except AlreadyExists:
            memory.clear(label)
        except (Forbidden, Invalid, UnknownKey) as error:
            return self._record_refusal(work, label, error)
        else:
            memory.clear(label)
        return None

    async def _create(self, work: Application, pod: Mapping[str, Any]) -> float:
        """Create a pod; return 0 when the job must be reconciled with the result, else the pause before the next attempt."""
        name = pod["metadata"]["name"]
        label = f"Pod/{name}"
        if (pause := work.memory.refusal_pause(label, now=self._clock())) > 0:
            return pause
        async with self._slots.hold(work.key):
            try:
                answer = await self._cluster.create(kinds.POD, work.key.namespace, pod)
            except AlreadyExists:
                return await self._read_holder(work, kinds.POD, name)
            except (Forbidden, Invalid) as error:
                return self._record_refusal(work, label, error)
        self._cache.put(kinds.POD, answer)
        work.memory.clear(label)
        return 0.0

    async def _read_holder(self, work: Application, kind: Kind, name: str) -> float:
        """Read the object that has the name of a create that met AlreadyExists; our own is put into the cache. Return a pause."""
        try:
            holder = await self._cluster.read(kind, work.key.namespace, name)
        except NotFound:
            return 0.0
        return self._adopt_or_wait(work, kind, holder) or 0.0

    def _adopt_or_wait(self, work: Application, kind: Kind, holder: Mapping[str, Any]) -> float | None:
        """Return None when the object that has a name we need is ours, a pause when it is an earlier job's or somebody else's."""
        meta = holder["metadata"]
        label = f"{kind.kind}/{meta['name']}"
        labels = meta.get("labels") or {}
        if labels.get(LABEL_JOB) != work.key.name or LABEL_JOB_UID not in labels:
            is_new = label not in work.memory.name_conflicts
            work.memory.name_conflicts[label] = kind
            return 0.0 if is_new else EARLIER_JOB_PAUSE
        self._cache.put(kind, holder)
        work.memory.clear(label)
        return None if labels[LABEL_JOB_UID] == work.uid else EARLIER_JOB_PAUSE

    def _record_refusal(self, work: Application, label: str, error: ApiError, *, manifest: str = "") -> float:
        """Record a refusal for `reconcile` to report; return 0 when it is the first, else the pause before the next attempt."""
        now = self._clock()
        if work.memory.record_refusal(label, error.message, now=now, manifest=manifest):
            logger.warning("%s was refused: %s", label, error.message)
            return 0.0
        return work.memory.refusal_pause(label, now=now, manifest=manifest)


def manifest_hash(obj: Mapping[str, Any]) -> str:
    """Return the manifest hash of a supporting object, which identifies its content; empty when it has none."""
    return str((obj["metadata"].get("annotations") or {}).get(ANNOTATION_MANIFEST_HASH, ""))


def _is_gone(answer: Mapping[str, Any]) -> bool:
    """Return whether the answer to a deletion says that the object is gone: no grace period and no finalizer is left."""
    meta = answer.get("metadata") or {}
    return answer.get("kind") != "Status" and meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")
