"""Handles the keys of the queue: observe, reconcile, apply.

One call of `handle` is one level-triggered reconcile of one job. It reads the cache only, with one exception. A plan that deletes,
restarts or ends something is made a second time after the job and its pods were read from the API server, because the cache alone never
decides that a pod is missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rl_core.api.defaults import Defaults
from rl_core.api.job import RLJob
from rl_core.plan.groups import group_blocks
from rljob_operator import kinds, naming
from rljob_operator.errors import NotFound
from rljob_operator.model import ControlCall, Object, Observed, OperatorConfig, Plan, Progress
from rljob_operator.naming import LABEL_JOB
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.runtime import logs
from rljob_operator.runtime.apply import Application, Applier, manifest_hash
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.deleted_jobs import DeletedJobs
from rljob_operator.runtime.kept_defaults import KeptDefaults
from rljob_operator.runtime.memory import JobMemory
from rljob_operator.runtime.progress import RunnerTarget, is_runner

logger = logging.getLogger(__name__)

CLAIMS_SECONDS = 600.0
MISSING_CLAIMS_SECONDS = 15.0
"""Seconds between two reads of the volume claims of a job, when all of them exist and when some do not."""

WRITES_PER_SECOND = 10.0
"""Largest rate of progress writes of all jobs together."""
COUNT_SECONDS = 5.0
"""Seconds between two counts of the running jobs."""

END_PHASES = ("Succeeded", "Failed")
FRESH_READ_PHASES = (*END_PHASES, "Restarting", "Suspended")
"""Phases that a job enters only after its state was read from the API server."""


class Reconcile(Protocol):
    """The pure decision function; implemented by `reconcile.reconcile`."""

    def __call__(
        self, job: Object, observed: Observed, now: float, *, config: OperatorConfig, known: ParsedJob | None
    ) -> Plan:
        """Return the plan for the job as observed."""


class Controller:
    """Reconciles jobs and holds the memory of each. The queue calls it for one key at a time."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        applier: Applier,
        reconcile: Reconcile,
        config: OperatorConfig,
        progress_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._kept_defaults = KeptDefaults(cluster)
        self._cache = cache
        self._applier = applier
        self._reconcile = reconcile
        self._config = config
        self._progress_seconds = progress_seconds
        self._clock = clock
        self._deleted_jobs = DeletedJobs(cluster=cluster, cache=cache, config=config)
        self._running = 0
        self._last_count = float("-inf")
        """When the running jobs were last counted."""
        self._memories: dict[JobKey, JobMemory] = {}

    def set_progress(self, key: JobKey, uid: str, progress: Progress) -> None:
        """Store the newest progress report of the runner of the job with this uid."""
        memory = self._memories.get(key)
        if memory is not None and memory.uid == uid:
            memory.progress = progress

    def progress(self, key: JobKey) -> Progress | None:
        """Return the newest progress report of the runner, None before the first."""
        memory = self._memories.get(key)
        return memory.progress if memory is not None else None

    def runners(self) -> Iterator[RunnerTarget]:
        """Yield the runners to poll: those of jobs that have not ended."""
        for key in self._cache.jobs():
            job = self._cache.job(key)
            if job is None:
                continue
            if (memory := self._memories.get(key)) is not None:
                job = memory.with_newest_status(job)
            runner = self._cache.entry(kinds.POD, key, naming.runner_pod(key.name))
            if phase_of(job) in (*END_PHASES, "Suspended") or runner is None:
                continue
            if is_runner(runner.value, job_uid=job["metadata"]["uid"]):
                yield RunnerTarget(
                    key=key,
                    job_uid=runner.value.job_uid,
                    pod_uid=runner.uid,
                    ip=runner.value.ip,
                    epoch=runner.value.epoch,
                    awaited=phase_of(job) != "Running" or bool(job["status"].get("draining")),
                )

    def set_answer(self, key: JobKey, uid: str, call: ControlCall, message: str) -> bool:
        """Store the answer of the runner to a control call. Return whether the job must be reconciled with it."""
        memory = self._memories.get(key)
        return memory is not None and memory.uid == uid and memory.record_answer(call, message)

    async def handle(self, key: JobKey) -> float | None:
        """Reconcile one job; return the seconds until it must be reconciled again, None = when something changes."""
        job = self._cache.job(key)
        if job is None or job["metadata"].get("deletionTimestamp") is not None:
            await self._handle_deleted(key)
            return None
        with logs.context(job=str(key), epoch=epoch_of(job), reconcile=uuid.uuid4().hex[:8]):
            return await self._handle(key, job)

    async def _handle_deleted(self, key: JobKey) -> None:
        """Fence the pods of a deleted job as long as there are any; each event of a pod or a policy leads here again."""
        memory = self._memories.get(key)
        job = memory.parsed.result if memory is not None else None
        if not isinstance(job, RLJob) or not await self._deleted_jobs.fence(key, job):
            self._memories.pop(key, None)

    async def _handle(self, key: JobKey, job: Object) -> float | None:
        memory = self._memory_of(key, job)
        await self._refresh_claims(key, job, memory)
        await self._recheck_name_conflicts(key, memory)
        self._drop_settled_refusals(key, memory)
        defaults = await self._kept_defaults.of(key, job)
        plan = self._plan(key, job, memory, defaults)
        if needs_fresh_reads(
            memory.with_newest_status(job), plan, due=lambda uid: memory.deletion_is_due(uid, now=self._clock())
        ):
            await self._refresh(key)
            refreshed = self._cache.job(key)
            if refreshed is None:
                return None
            job, memory = refreshed, self._memory_of(key, refreshed)
            defaults = await self._kept_defaults.of(key, job)
            plan = self._plan(key, job, memory, defaults)
        manifest_hashes = {f"{obj['kind']}/{obj['metadata']['name']}": manifest_hash(obj) for obj in plan.ensure}
        if memory.forget_refused_applies(manifest_hashes):
            plan = self._plan(key, job, memory, defaults)
        applied = await self._applier.apply(
            Application(key=key, job=job, plan=plan, memory=memory, progress_interval=self._progress_interval())
        )
        return applied.again_after

    def _plan(self, key: JobKey, job: Object, memory: JobMemory, defaults: Defaults | None) -> Plan:
        observed = Observed(
            pods=tuple(self._cache.children(kinds.POD, key)),
            objects=tuple(self._cache.support(key)),
            name_conflicts=tuple(sorted(memory.name_conflicts)),
            refusals={label: refusal.message for label, refusal in sorted(memory.refusals.items())},
            claims=dict(memory.claims),
            defaults=defaults,
            progress=memory.progress,
            refused_change=memory.refused_change,
        )
        return self._reconcile(
            memory.with_newest_status(job), observed, self._clock(), config=self._config, known=memory.parsed
        )

    def _memory_of(self, key: JobKey, job: Object) -> JobMemory:
        uid = job["metadata"]["uid"]
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = JobMemory(uid)
        return memory

    def _progress_interval(self) -> float:
        """Return the least seconds between two progress writes of one job. It grows with the number of jobs that have not ended."""
        now = self._clock()
        if now >= self._last_count + COUNT_SECONDS:
            jobs = [job for key in self._cache.jobs() if (job := self._cache.job(key)) is not None]
            self._running = sum(phase_of(job) not in (*END_PHASES, "Suspended") for job in jobs)
            self._last_count = now
        return max(self._progress_seconds, self._running / WRITES_PER_SECOND)

    def _drop_settled_refusals(self, key: JobKey, memory: JobMemory) -> None:
        """Forget refused creates of objects that exist by now. A refused apply stays, because the object may exist in an older form."""
        for label, refusal in list(memory.refusals.items()):
            kind, _, name = label.partition("/")
            if not refusal.manifest and self._cache.holds(key, kind, name):
                memory.clear(label)

    async def _refresh(self, key: JobKey) -> None:
        """Read the job and its pods from the API server into the cache."""
        await asyncio.gather(self._refresh_job(key), self._refresh_pods(key))

    async def _refresh_job(self, key: JobKey) -> None:
        read_at = self._cache.now()
        try:
            job = await self._cluster.read(kinds.RLJOB, key.namespace, key.name)
        except NotFound:
            if (cached := self._cache.job(key)) is not None:
                self._cache.drop(kinds.RLJOB, cached)
        else:
            self._cache.put(kinds.RLJOB, job, read_at=read_at)

    async def _refresh_pods(self, key: JobKey) -> None:
        read_at = self._cache.now()
        alive: set[str] = set()
        async for page in self._cluster.list(kinds.POD, key.namespace, selector=f"{LABEL_JOB}={key.name}"):
            for pod in page:
                alive.add(pod["metadata"]["uid"])
                self._cache.put(kinds.POD, pod, read_at=read_at)
        self._cache.sweep(kinds.POD, alive=alive, began=read_at, within=lambda other_key: other_key == key)

    async def _refresh_claims(self, key: JobKey, job: Object, memory: JobMemory) -> None:
        """Read the volume claims that the job names when they are due. They are not watched."""
        now = self._clock()
        if now < memory.claims_due or phase_of(job) in END_PHASES:
            return
        names = claim_names(job)
        claims = await asyncio.gather(*(self._read_claim(key, name) for name in names))
        memory.claims = {name: claim for name, claim in zip(names, claims, strict=True) if claim is not None}
        memory.claims_due = now + (CLAIMS_SECONDS if len(memory.claims) == len(names) else MISSING_CLAIMS_SECONDS)

    async def _read_claim(self, key: JobKey, name: str) -> Mapping[str, Any] | None:
        try:
            return await self._cluster.read(kinds.CLAIM, key.namespace, name)
        except NotFound:
            return None

    async def _recheck_name_conflicts(self, key: JobKey, memory: JobMemory) -> None:
        """Read the objects of name conflicts again, so that the job continues when the names are free."""
        for label, kind in list(memory.name_conflicts.items()):
            name = label.partition("/")[2]
            try:
                holder = await self._cluster.read(kind, key.namespace, name)
            except NotFound:
                memory.clear(label)
                continue
            if (holder["metadata"].get("labels") or {}).get(LABEL_JOB) == key.name:
                memory.clear(label)


def needs_fresh_reads(job: Object, plan: Plan, *, due: Callable[[str], bool] = lambda uid: True) -> bool:
    """Return whether the plan deletes, restarts or ends something now, and so must be made from state read from the API server.

    `due` says for the uid of an object whether its deletion will be attempted now. A deletion in back-off sends no request.
    """
    if any(due(deletion.uid) for deletion in plan.delete):
        return True
    if plan.status is None:
        return False
    phase, epoch = plan.status.get("phase"), int(plan.status.get("epoch") or 0)
    if epoch_of(job) and epoch != epoch_of(job):  # The first epoch follows no other one.
        return True
    return phase in FRESH_READ_PHASES and phase != phase_of(job)


def phase_of(job: Object) -> str:
    """Return status.phase, empty before the first reconcile."""
    return str((job.get("status") or {}).get("phase") or "")


def epoch_of(job: Object) -> int:
    """Return status.epoch, 0 before the first reconcile."""
    return int((job.get("status") or {}).get("epoch") or 0)


def claim_names(job: Object) -> list[str]:
    """Return the names of the PersistentVolumeClaims that the volumes of the groups mount."""
    spec = job.get("spec") or {}
    volumes = [volume for pods in group_blocks(spec).values() for volume in pods.get("volumes") or []]
    return sorted({claim["claimName"] for volume in volumes if (claim := volume.get("persistentVolumeClaim"))})
