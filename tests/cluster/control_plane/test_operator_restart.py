"""What a restarted, an idle and a killed operator leave behind: nothing that was not there."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from operator_rig.jobs import Jobs, until
from operator_rig.kubelet import Kubelet
from operator_rig.runner import FakeRunner

from rljob_operator import kinds
from rljob_operator.cluster import Cluster
from rljob_operator.kinds import Kind


async def test_a_restarted_operator_writes_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(address=kubelet.address("job-actor-0"), step=3, policyVersion=3):
        first = await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await first.settle(quiet=3.0)
        await first.stop()
        before = await jobs.get()
        second = await start()
        await second.settle(quiet=3.0)
        assert second.writes() == {}
        assert (await jobs.get())["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_an_idle_operator_writes_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(address=kubelet.address("job-actor-0"), step=3, policyVersion=3) as runner:
        replica = await start(resync_seconds=1.0)
        await jobs.create()
        await jobs.wait_phase("Running")
        await replica.settle(quiet=3.0)
        before, polls = replica.writes(), runner.polls
        await asyncio.sleep(5.0)
        secrets = ("POST", "secrets", "409")
        changed = {key: n for key, n in replica.writes().items() if n != before.get(key) and key != secrets}
        assert changed == {}, "a resync asserts the Secret, which is there, and writes nothing else"
        assert runner.polls > polls


class Killed(BaseException):
    """The operator's process ends here."""


class KilledAfter:
    """A `Cluster` whose process dies at its k-th request: before the request goes out, or after it was carried out."""

    def __init__(self, cluster: Cluster, *, calls: int, after: bool) -> None:
        self._cluster = cluster
        self._left = calls
        self._after = after
        self.dead = asyncio.Event()
        self.what = ""

    async def _die_at(self, what: str, call: Any) -> Any:
        if self.dead.is_set():
            call.close()
            await asyncio.Event().wait()  # a dead process sends nothing more
        self._left -= 1
        if self._left > 0:
            return await call
        self.what = what
        self.dead.set()
        if self._after:
            await call
        else:
            call.close()
        await asyncio.Event().wait()
        raise AssertionError("the dead do not go on")

    async def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return await self._die_at(f"read {kind.kind}", self._cluster.read(kind, namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str = ""
    ) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in self._cluster.list(kind, namespace, selector=selector):
            yield page

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._die_at(f"create {kind.kind}", self._cluster.create(kind, namespace, body))

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._die_at(f"apply {kind.kind}", self._cluster.apply(kind, namespace, name, body))

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        return await self._die_at(f"patch {kind.kind}", self._cluster.patch(kind, namespace, name, body, **more))

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._die_at(f"replace {kind.kind}", self._cluster.replace(kind, namespace, name, body))

    async def delete(self, kind: Kind, namespace: str, name: str, **more: Any) -> dict[str, Any]:
        return await self._die_at(f"delete {kind.kind}", self._cluster.delete(kind, namespace, name, **more))


MOST_CALLS = 200


async def play(
    jobs: Jobs, start, kubelet: Kubelet, *, calls: int, after: bool, name: str
) -> tuple[bool, dict[str, Any]]:
    """Let an operator die at its k-th request on a fresh job, and a second one finish; return whether it died, and the end."""
    faults: list[KilledAfter] = []

    def wrap(cluster: Cluster) -> Cluster:
        faults.append(KilledAfter(cluster, calls=calls, after=after))
        return faults[0]

    await jobs.create(name)
    dying = await start(wrap=wrap, leader_elect=False)

    async def settled_or_dead() -> bool:
        return faults[0].dead.is_set() or len(await jobs.pods(name)) == 4

    await until(settled_or_dead, "the end or the whole job")
    died = faults[0].dead.is_set()
    if not died:
        await dying.settle()
        died = faults[0].dead.is_set()
    await dying.stop()
    second = await start(leader_elect=False)
    pods = [f"{name}-actor-0", f"{name}-rollout-0", f"{name}-rollout-1", f"{name}-env-0"]
    await jobs.wait_pods(*pods, name=name)
    await second.settle()
    await second.stop()
    return died, await end_state(jobs, name)


async def end_state(jobs: Jobs, name: str) -> dict[str, Any]:
    """Return what there is of a job, without what differs between any two."""
    job = await jobs.get(name)
    found: dict[str, Any] = {}
    for kind in (*kinds.OWNED, kinds.SECRET):
        owned = [
            o
            for o in await jobs.list(kind)
            if [r["uid"] for r in o["metadata"].get("ownerReferences", [])] == [job["metadata"]["uid"]]
        ]
        names = sorted(o["metadata"]["name"].replace(job["metadata"]["uid"][:8], "UID") for o in owned)
        found[kind.plural] = [n.removeprefix(name) for n in names]
    status = job["status"]
    found["epochs"] = sorted({pod["metadata"]["labels"]["rljob.dev/epoch"] for pod in (await jobs.pods(name)).values()})
    found["status"] = {key: status.get(key) for key in ("epoch", "restarts", "totalRestarts", "phase")}
    return found


async def test_an_operator_killed_at_any_request_leaves_neither_duplicates_nor_orphans(jobs: Jobs, start) -> None:
    """At each request boundary in turn, before it is sent and after it was carried out, until a run needs fewer requests."""
    _, whole = await play(jobs, start, None, calls=MOST_CALLS, after=False, name="whole")
    points = 0
    for calls in range(1, MOST_CALLS):
        after = calls % 2 == 0
        died, end = await play(jobs, start, None, calls=calls, after=after, name=f"k{calls}")
        if not died:
            break
        assert end == whole, f"killed {'after' if after else 'before'} request {calls}"
        points += 1
        await jobs.delete(f"k{calls}")
    assert points >= 12
