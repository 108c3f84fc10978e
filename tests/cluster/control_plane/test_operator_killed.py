"""The operator killed at each of its requests in turn, before it is sent and after it was carried out.

A life is one process' worth of the operator without its watches: it lists, looks at each job until nothing is left to do, and dies at
its k-th request. The next life finds what the first left. Whatever k is, the end is that of a life nobody ended: no duplicate, no
orphan, no restart counted twice.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from rljob_operator import kinds, naming
from rljob_operator.errors import NotFound
from rljob_operator.kinds import Kind
from rljob_operator.model import ControlCall, JobEvent, Object, OperatorConfig
from rljob_operator.runtime.app import Operator
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.master_key import KeyRing
from rljob_operator.runtime.relist import Relister
from rljob_operator.runtime.settings import Settings
from tests.cluster.operator_rig.jobs import Jobs, until
from tests.cluster.operator_rig.replica import home_of

MASTER = bytes(32)
MOST_REQUESTS = 200
QUIET_LOOKS = 10


class Mortal:
    """A `Cluster` whose process dies at its k-th request: just before it is sent, or just after it was carried out."""

    def __init__(self, cluster: Cluster, *, requests: int, after: bool) -> None:
        self._cluster = cluster
        self._requests = requests
        self._after = after
        self.sent = 0
        self.dead = asyncio.Event()
        self.last = ""

    async def _send(self, what: str, request: Awaitable[Any]) -> Any:
        self.sent += 1
        if self.dead.is_set() or (self.sent >= self._requests and not self._after):
            request.close()  # type: ignore[attr-defined]
            await self._die(what)
        answer = await request
        if self.sent >= self._requests:
            await self._die(what)
        return answer

    async def _die(self, what: str) -> None:
        self.last = self.last or what
        self.dead.set()
        await asyncio.Event().wait()

    async def read(self, kind: Kind, namespace: str, name: str) -> Any:
        return await self._send(f"read {kind.kind}", self._cluster.read(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> AsyncIterator[Any]:
        async for page in self._cluster.list(kind, namespace, selector=selector):
            yield page

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Any:
        return await self._send(f"create {kind.kind}", self._cluster.create(kind, namespace, body))

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Any:
        return await self._send(f"apply {kind.kind}", self._cluster.apply(kind, namespace, name, body))

    async def patch(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], **more: Any) -> Any:
        return await self._send(f"patch {kind.kind}", self._cluster.patch(kind, namespace, name, body, **more))

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Any:
        return await self._send(f"replace {kind.kind}", self._cluster.replace(kind, namespace, name, body))

    async def delete(self, kind: Kind, namespace: str, name: str, **more: Any) -> Any:
        return await self._send(f"delete {kind.kind}", self._cluster.delete(kind, namespace, name, **more))


class Silent:
    """No runner answers, and nobody takes events."""

    def send(self, key: JobKey, job_uid: str, calls: Sequence[ControlCall]) -> None:
        pass

    def record(self, job: Object, event: JobEvent) -> None:
        pass


async def live(jobs: Jobs, *, requests: int = MOST_REQUESTS, after: bool = False) -> Mortal:
    """Live until there is nothing left to do, or until death at the k-th request."""
    cluster = Mortal(jobs.api, requests=requests, after=after)
    settings = Settings(config=OperatorConfig(namespace=home_of(jobs.namespace)), watch_namespaces=(jobs.namespace,))
    operator = Operator(settings=settings, configuration=None)  # type: ignore[arg-type]
    relister = Relister(cluster=jobs.api, cache=operator.cache, enqueue=operator.queue.add, namespaces=[jobs.namespace])
    await relister.fill()
    controller = operator.controller(cluster, relister, ring=KeyRing(MASTER), recorder=Silent(), calls=Silent())  # type: ignore[arg-type]
    for key in operator.cache.jobs():
        operator.queue.add(key)
    working = asyncio.create_task(operator.queue.run(controller.handle, workers=2))
    quiet, sent = 0, -1
    while not cluster.dead.is_set() and quiet < QUIET_LOOKS:
        await asyncio.sleep(0.02)
        quiet = quiet + 1 if operator.queue.idle and cluster.sent == sent else 0
        sent = cluster.sent
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return cluster


async def end_state(jobs: Jobs, name: str) -> dict[str, Any]:
    """Return what there is of a job, without what differs between any two."""
    job = await jobs.get(name)
    uid = job["metadata"]["uid"]
    found: dict[str, Any] = {}
    for kind in (*kinds.OWNED, kinds.SECRET):
        owned = [
            o for o in await jobs.list(kind) if [r["uid"] for r in o["metadata"].get("ownerReferences", [])] == [uid]
        ]
        found[kind.plural] = sorted(o["metadata"]["name"].removeprefix(name).replace(uid[:8], "UID") for o in owned)
    pods = await jobs.pods(name)
    found["epochs"] = {
        pod.removeprefix(name): obj["metadata"]["labels"][naming.LABEL_EPOCH] for pod, obj in pods.items()
    }
    found["status"] = {key: job["status"].get(key) for key in ("epoch", "restarts", "totalRestarts", "phase")}
    return found


async def nothing(jobs: Jobs, name: str) -> None:
    """The job is new."""


async def lose_an_actor(jobs: Jobs, name: str) -> None:
    """The job is whole, and then a rank of its actor is gone."""
    await live(jobs)
    await jobs.delete_pod(f"{name}-actor-0", now=True)


async def lose_a_rollout(jobs: Jobs, name: str) -> None:
    """The job is whole, and then a rollout is gone."""
    await live(jobs)
    await jobs.delete_pod(f"{name}-rollout-1", now=True)


async def shrink(jobs: Jobs, name: str) -> None:
    """The job is whole, and then wants one rollout less."""
    await live(jobs)
    await jobs.change({"rollout": {"replicas": 1}}, name)


async def suspend(jobs: Jobs, name: str) -> None:
    """The job is whole, and then is to be suspended; no runner answers, so it ends at once when actor-0 is gone."""
    await live(jobs)
    await jobs.change({"suspend": True}, name)
    await jobs.delete_pod(f"{name}-actor-0", now=True)


@pytest.mark.parametrize(
    ("before", "least"),
    [(nothing, 12), (lose_an_actor, 5), (lose_a_rollout, 2), (shrink, 2), (suspend, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_kill_at_any_request_changes_nothing_in_the_end(
    jobs: Jobs, before: Callable[[Jobs, str], Awaitable[None]], least: int
) -> None:
    async def play(name: str, *, requests: int, after: bool) -> tuple[Mortal, dict[str, Any]]:
        await jobs.create(name, actor={"replicas": 1})
        await before(jobs, name)
        first = await live(jobs, requests=requests, after=after)
        await until(lambda: none_half_deleted(name), f"the pods of {name} that were being deleted gone")
        await live(jobs)
        end = await end_state(jobs, name)
        await jobs.delete(name)
        await until(lambda: gone(name), f"{name} gone")
        return first, end

    async def none_half_deleted(name: str) -> bool:
        """A deletion whose sender dies may be carried out halfway: marked, not removed. The cluster's own collector ends it."""
        return not any(pod["metadata"].get("deletionTimestamp") for pod in (await jobs.pods(name)).values())

    async def gone(name: str) -> bool:
        for pod in await jobs.pods(name):
            with contextlib.suppress(NotFound):  # the garbage collector was quicker
                await jobs.delete_pod(pod, now=True)
        return not [job for job in await jobs.list(kinds.RLJOB) if job["metadata"]["name"] == name]

    _, whole = await play("whole", requests=MOST_REQUESTS, after=False)
    deaths = []
    for after in (False, True):
        for requests in range(1, MOST_REQUESTS):
            first, end = await play(f"{'a' if after else 'b'}{requests}", requests=requests, after=after)
            if not first.dead.is_set():
                break
            deaths.append(first.last)
            assert end == whole, f"killed {'after' if after else 'before'} request {requests}: {first.last}"
    assert len(deaths) >= 2 * least, deaths
