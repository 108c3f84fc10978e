"""The operator process: builds its parts, starts them in order and stops them in order.

    API server --watch--> kopf --> Watches --> Cache --> WorkQueue --> Controller: reconcile -> apply --> API server
         ^--- list --- Relister ------^                     ^
    runners <--- Poller ------------------------------------+

Every replica watches and lists, so that the cache of a standby is always filled. The queue's workers, the poller and the event writer run
on the leader only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from kubernetes.aio import client

from rljob_operator import kinds
from rljob_operator.errors import ApiError, NotFound
from rljob_operator.manifests import gang, secret
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.runtime import handlers, master_key
from rljob_operator.runtime.apply import Applier
from rljob_operator.runtime.cache import Cache, JobKey, head, policy
from rljob_operator.runtime.cluster import ApiCluster, Cluster
from rljob_operator.runtime.control_calls import ControlCalls
from rljob_operator.runtime.controller import Controller
from rljob_operator.runtime.events import EventRecorder
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.health import Health
from rljob_operator.runtime.leader import Leadership
from rljob_operator.runtime.master_key import KeyRing
from rljob_operator.runtime.metrics import Metrics
from rljob_operator.runtime.progress import Poller, RunnerClient
from rljob_operator.runtime.queue import WorkQueue
from rljob_operator.runtime.relist import Relister
from rljob_operator.runtime.settings import Settings

logger = logging.getLogger(__name__)

RESYNC_TICK = 5.0
CLUSTER_PAUSE = 2.0
PROJECTIONS = {
    **dict.fromkeys((*kinds.SUPPORT, *gang.KINDS), head),
    kinds.POD: pod_views.pod_view,
    kinds.NETWORK_POLICY: policy,
}


class Operator:
    """One replica of the operator."""

    def __init__(
        self,
        *,
        settings: Settings,
        configuration: Callable[[], Awaitable[client.Configuration]],
        wrap: Callable[[Cluster], Cluster] = lambda cluster: cluster,
        on_watching: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._wrap = wrap
        """Wraps the client of the API; tests use it to inject faults."""
        self._on_watching = on_watching
        """Called when kopf is running. It has installed its signal handlers by then, and the caller may replace them."""
        self.metrics = Metrics()
        self.cache = Cache(projections=PROJECTIONS)
        self.queue: WorkQueue[JobKey] = WorkQueue(observer=self.metrics, expected=(ApiError,))
        self.health = Health(metrics=self.metrics, ready=self._why_not_ready)
        self.leadership: Leadership | None = None
        self._relister: Relister | None = None
        self._streaming = False
        self.watching = asyncio.Event()
        """Set when the caches are filled and kopf is up."""
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Request the end of `run`."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` is called. Raises leader.LeaseLost, or the error of a part that failed."""
        settings = self._settings
        self.metrics.watch_queue(self.queue.__len__, lambda: self.queue.delayed)
        self.metrics.watch_cache(self.cache)
        await self.health.start(host=settings.metrics_host, port=settings.metrics_port)
        api = client.ApiClient(await self._configuration())
        # The Lease has connections of its own, so that its renewal never waits behind requests for pods.
        lease_client = client.ApiClient(await self._configuration())
        try:
            cluster, lease = (
                self._wrap(ApiCluster(api_client, observe=self.metrics.requested)) for api_client in (api, lease_client)
            )
            self._streaming = await _streams_lists(api)
            await self._serve(cluster, lease)
        finally:
            await api.close()
            await lease_client.close()
            await self.health.stop()

    async def _serve(self, cluster: Cluster, lease: Cluster) -> None:
        """Run the parts of every replica and, while leading, those of the leader; `lease` is a separate connection for the Lease."""
        settings = self._settings
        self._relister = Relister(
            cluster=cluster,
            cache=self.cache,
            enqueue=self.queue.add,
            namespaces=settings.watch_namespaces,
            interval=settings.relist_seconds,
            alternatives=gang.KINDS,
        )
        self.leadership = Leadership(
            cluster=lease,
            namespace=settings.config.namespace,
            identity=settings.identity,
            duration=settings.lease_seconds,
            on_change=self.metrics.led,
        )
        parts = [
            asyncio.create_task(self.health.run(), name="health"),
            asyncio.create_task(self._watch(self._relister), name="watches"),
            asyncio.create_task(self._lead(cluster, self._relister, self.leadership), name="leader"),
        ]
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([stopping, *reversed(parts)])
            await self.leadership.release()
        for task in done:
            await task

    async def _watch(self, relister: Relister) -> None:
        """Fill the cache by lists, then update it by kopf's watches and further lists.

        kopf starts after the first lists, because without scanning it serves only the resources it finds at its start.
        """
        await self._fill(relister)
        watches = handlers.Watches(
            cache=self.cache, enqueue=self.queue.add_after, suspect=relister.suspect, count=self.metrics.watched
        )
        ready = asyncio.Event()
        kopf = asyncio.create_task(
            handlers.watch(
                handlers.registry(watches, kinds=relister.served, configuration=self._configuration),
                kinds=relister.served,
                namespaces=self._settings.watch_namespaces,
                initial_streaming=self._streaming,
                ready=ready,
            ),
            name="kopf",
        )
        started = asyncio.create_task(ready.wait(), name="kopf start")
        lists = asyncio.create_task(relister.run(), name="lists")
        try:
            await asyncio.wait([kopf, started], return_when=asyncio.FIRST_COMPLETED)
            self._on_watching()
            self.watching.set()
            done, _ = await asyncio.wait([kopf, lists], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            await _cancel([kopf, started, lists])

    async def _fill(self, relister: Relister) -> None:
        """List every kind once, retrying until the API server and the RLJob resource are available."""
        while not relister.filled.is_set():
            try:
                await relister.fill()
            except NotFound:
                logger.warning(
                    "the cluster does not serve %s.%s; install the CRD", kinds.RLJOB.plural, kinds.RLJOB.group
                )
                await asyncio.sleep(CLUSTER_PAUSE)
            except ApiError as error:
                logger.warning("listing failed, again in %.0f s: %s", CLUSTER_PAUSE, error)
                await asyncio.sleep(CLUSTER_PAUSE)
        logger.info("the cache is filled: %s", self.cache.sizes())

    async def _lead(self, cluster: Cluster, relister: Relister, leadership: Leadership) -> None:
        """Wait for a filled cache and then for the Lease, and run the leader's parts until it is lost.

        A replica that cannot list must not lead.
        """
        settings = self._settings
        await relister.filled.wait()
        if settings.leader_elect:
            await leadership.acquire()
        # Nothing is decompressed: a small answer of a tenant's program may hold gigabytes.
        session = aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "identity"})
        async with session, asyncio.TaskGroup() as group:
            if settings.leader_elect:
                group.create_task(leadership.keep(), name="lease")
            jobs = (self.cache.job(key) or {} for key in self.cache.jobs())
            ring = await master_key.obtain(cluster, namespace=settings.config.namespace, jobs=jobs)
            recorder = EventRecorder(cluster=cluster, identity=settings.identity, dropped=self.metrics.event_dropped)
            runner = RunnerClient(master=lambda uid: ring.of(self.cache.job_of(uid)), session=session)
            calls = ControlCalls(
                client=runner,
                answered=lambda key, *answer: self.queue.add(key) if controller.set_answer(key, *answer) else None,
            )
            controller = self.controller(cluster, relister, ring=ring, recorder=recorder, calls=calls)
            poller = Poller(
                client=runner,
                targets=controller.runners,
                known=controller.progress,
                report=controller.set_progress,
                enqueue=self.queue.add,
                interval=settings.poll_seconds,
            )
            for key in self.cache.jobs():
                self.queue.add(key)
            group.create_task(recorder.run(), name="events")
            group.create_task(poller.run(), name="polls")
            group.create_task(calls.run(), name="control calls")
            group.create_task(self._resync(), name="resync")
            group.create_task(self.queue.run(controller.handle, workers=settings.workers), name="queue")

    def controller(
        self, cluster: Cluster, relister: Relister, *, ring: KeyRing, recorder: EventRecorder, calls: ControlCalls
    ) -> Controller:
        """Return the controller over the replica's cache; `relister` says which kinds are served."""
        settings = self._settings
        gang_api = next((kind.api_version for kind in gang.KINDS if kind in relister.served), None)
        logger.info("gang scheduling: %s", gang_api or "none, the cluster serves no API for it")
        applier = Applier(
            cluster=cluster,
            cache=self.cache,
            slots=FairSlots(total=settings.api_in_flight, per_key=settings.creates_in_flight),
            recorder=recorder,
            calls=calls,
            build_secret=lambda job: secret.build(job, master=ring.of(job)),
            secret_seconds=settings.resync_seconds,
        )
        return Controller(
            cluster=cluster,
            cache=self.cache,
            applier=applier,
            reconcile=reconcile,
            config=dataclasses.replace(settings.config, gang_api=gang_api, key_id=ring.newest),
            progress_seconds=settings.progress_seconds,
        )

    async def _resync(self) -> None:
        """Reconcile every job once per resync interval, spread evenly over the interval."""
        interval = self._settings.resync_seconds
        loop = asyncio.get_running_loop()
        due_times: dict[JobKey, float] = {}
        while True:
            now = loop.time()
            due_times = {key: due_times.get(key, now + interval * random.random()) for key in self.cache.jobs()}
            for key in [key for key, due in due_times.items() if due <= now]:
                due_times[key] = now + interval
                self.queue.add(key)
            await asyncio.sleep(min(RESYNC_TICK, interval))

    def _why_not_ready(self) -> str:
        if self._relister is None or not self._relister.filled.is_set():
            return "the cache is not filled yet"
        return ""


async def _streams_lists(api: client.ApiClient) -> bool:
    """Return whether the API server streams initial lists (1.34 and later); an unknown version counts as no."""
    try:
        version: Any = await client.VersionApi(api).get_code()
    except (client.ApiException, aiohttp.ClientError, TimeoutError, OSError):
        return False
    digits = "".join(c for c in version.minor if c.isdigit())
    return (int(version.major), int(digits or 0)) >= (1, 34)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their errors are raised where they are awaited."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
