"""One tenant against all: a runner that lies, a stranger on a runner's address, a finalizer that is never taken off, a Lease that answers late."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rljob_operator import kinds
from rljob_operator.kinds import Kind
from rljob_operator.runtime.cluster import Cluster
from rljob_operator.runtime.progress import CONTROL_PORT
from tests.cluster.operator_rig.jobs import Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.replica import Replica, home_of
from tests.cluster.operator_rig.runner import FakeRunner
from tests.cluster.testcluster.access import Access

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
HELD_SECONDS = 5.0


async def nested(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"[" * 200_000)


async def unsigned(writer: asyncio.StreamWriter) -> None:
    """A stranger on the address says that the run is done, and that nobody is needed."""
    writer.write(
        HEAD
        + b'{"phase": "Finished", "epoch": 1, "step": 99, "members": [{"pod": "liar-rollout-1", "state": "drained"}]}'
    )


async def endless(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(HEAD + b" " * 65536)
        await writer.drain()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


@asynccontextmanager
async def lying(address: str, answers: list[Answer]) -> AsyncIterator[list[Answer]]:
    """Answer one call after the other in these ways, over and over; yields the ways that were taken."""
    taken: list[Answer] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = answers[len(taken) % len(answers)]
        taken.append(way)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await way(writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, address, CONTROL_PORT)
    try:
        yield taken
    finally:
        server.close()


async def test_a_runner_that_lies_costs_the_others_nothing_and_is_not_believed(
    jobs: Jobs, start: Callable[..., Awaitable[Replica]], kubelet: Kubelet
) -> None:
    answers = [nested, unsigned, cut, endless, silent]
    replica = await start()
    async with (
        lying(kubelet.address("liar-actor-0"), answers) as taken,
        FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=1) as runner,
    ):
        await jobs.create("liar")
        await jobs.create()
        await jobs.wait_phase("Running")

        async def all_tried() -> bool:
            return len(taken) > len(answers)

        await until(all_tried, "every way of lying tried", seen=lambda: jobs_seen(taken))
        runner.status |= {"step": 9, "policyVersion": 9}

        async def told() -> bool:
            return (await jobs.get())["status"].get("step") == 9

        await until(told, "the other job's step")
        assert replica.task is not None and not replica.task.done()
        liar = (await jobs.get("liar"))["status"]
        assert liar["phase"] == "Starting" and liar.get("step") is None and liar["totalRestarts"] == 0
        assert len(await jobs.pods("liar")) == 4


async def jobs_seen(taken: list[Answer]) -> str:
    return ", ".join(way.__name__ for way in taken)


async def test_a_finalizer_of_someone_else_is_not_fought(
    jobs: Jobs, start: Callable[..., Awaitable[Replica]], kubelet: Kubelet
) -> None:
    replica = await start()
    await jobs.create()
    pods = await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-rollout-1", "job-env-0")
    body = {"metadata": {"uid": pods["job-rollout-1"]["metadata"]["uid"], "finalizers": ["someone.else/holds"]}}
    await jobs.api.patch(kinds.POD, jobs.namespace, "job-rollout-1", body)
    await kubelet.end("job-rollout-1", code=1)

    async def going() -> bool:
        return "deletionTimestamp" in (await jobs.pods())["job-rollout-1"]["metadata"]

    await until(going, "the ended pod deleted")
    before = replica.requests()
    await asyncio.sleep(HELD_SECONDS)
    asked = {key: number - before.get(key, 0) for key, number in replica.requests().items() if key[1] != "leases"}
    assert sum(asked.values()) <= 4 * HELD_SECONDS, asked
    held = pods["job-rollout-1"]["metadata"]["uid"]
    await jobs.api.patch(kinds.POD, jobs.namespace, "job-rollout-1", {"metadata": {"finalizers": None}})

    async def replaced() -> bool:
        return (await jobs.pods()).get("job-rollout-1", {"metadata": {"uid": held}})["metadata"]["uid"] != held

    await until(replaced, "the replacement")


async def test_a_namespace_that_is_gone_takes_no_other_with_it(
    control_plane: Access, jobs: Jobs, start: Callable[..., Awaitable[Replica]], rights: list[dict[str, Any]]
) -> None:
    """The account had its rights in the namespace; they went with it, and every request there is refused."""
    account = control_plane.kubeconfig_of("rljob-operator", namespace=home_of(jobs.namespace))
    replica = await start(kubeconfig=account, watch_namespaces=(jobs.namespace, "was-here-once"))
    await jobs.create()
    await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-rollout-1", "job-env-0")
    await jobs.delete_pod("job-env-0")
    await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-rollout-1", "job-env-0")
    assert replica.task is not None and not replica.task.done()


class LateLease:
    """Answers each write of the Lease late, once `late` is set; passes everything else on."""

    def __init__(self, cluster: Cluster, late: asyncio.Event, seconds: float) -> None:
        self._cluster, self._late, self._seconds = cluster, late, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._cluster.replace(kind, namespace, name, body)
        if kind == kinds.LEASE and self._late.is_set():
            await asyncio.sleep(self._seconds)
        return answer


async def test_a_leader_whose_lease_answers_late_ends_before_another_may_lead(
    jobs: Jobs, start: Callable[..., Awaitable[Replica]]
) -> None:
    late = asyncio.Event()
    replica = await start(lease_seconds=6.0, wrap=lambda cluster: LateLease(cluster, late, 30.0))
    await jobs.create()
    await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-rollout-1", "job-env-0")
    late.set()
    assert replica.task is not None
    done, _ = await asyncio.wait([replica.task], timeout=20)
    assert done and replica.task.exception() is not None, "it must not act on a Lease of which it knows nothing"
