"""An API server that goes away, forgets, or is fought over: the operator finds its way back and does nothing twice."""

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rljob_operator import kinds
from rljob_operator.errors import ApiError
from rljob_operator.runtime.cluster import Cluster
from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until
from tests.cluster.testcluster.access import Access

STARTER = ThreadPoolExecutor(max_workers=1)
"""Programs of the cluster die with the thread that started them, so that thread lives as long as the session."""

FOUND = "found objects gone without an event"


async def restart_api_server(control_plane: Access, *, compact: bool = False) -> None:
    server = control_plane.cluster.control_plane.api_server
    loop = asyncio.get_running_loop()
    if compact:
        await loop.run_in_executor(STARTER, control_plane.cluster.control_plane.compact)
    await loop.run_in_executor(STARTER, server.stop)
    await loop.run_in_executor(STARTER, server.start)


async def replaced(jobs: Jobs, name: str, uid: str) -> None:
    async def look() -> bool:
        with contextlib.suppress(ApiError):
            pods = await jobs.pods()
            return name in pods and pods[name]["metadata"]["uid"] != uid
        return False

    await until(look, f"a new {name}")


async def test_a_restarted_api_server_is_found_again(control_plane: Access, jobs: Jobs, start, kubelet) -> None:
    replica = await start(lease_seconds=300.0)  # longer than the API server may be away
    await jobs.create()
    before = await jobs.wait_pods(*STANDARD)
    await restart_api_server(control_plane)
    uid = await jobs.delete_pod("job-env-0")
    await replaced(jobs, "job-env-0", uid)
    after = await jobs.wait_pods(*STANDARD)
    assert {n for n in STANDARD if before[n]["metadata"]["uid"] != after[n]["metadata"]["uid"]} == {"job-env-0"}
    assert not replica.task.done()


async def test_pods_deleted_while_no_watch_could_see_it_are_replaced(
    control_plane: Access, jobs: Jobs, process
) -> None:
    """The operator stands still, its watch's revision is compacted away: no DELETED comes, our own list finds the gap."""
    operator, log = process("stopped", LEADER_ELECT="false", LOG_LEVEL="DEBUG")
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    uid = await jobs.delete_pod("job-env-0", now=True)
    await replaced(jobs, "job-env-0", uid)  # so its watches run
    before, found = await jobs.wait_pods(*STANDARD), log.read_text().count(FOUND)
    operator.send_signal(signal.SIGSTOP)
    await restart_api_server(control_plane)  # its watches are cut, and it cannot begin new ones
    uid = await jobs.delete_pod("job-env-0", now=True)
    await restart_api_server(control_plane, compact=True)
    assert "job-env-0" not in await jobs.pods()
    operator.send_signal(signal.SIGCONT)
    await replaced(jobs, "job-env-0", uid)
    after = await jobs.wait_pods(*STANDARD)
    assert {n for n in STANDARD if before[n]["metadata"]["uid"] != after[n]["metadata"]["uid"]} == {"job-env-0"}
    assert log.read_text().count(FOUND) > found


class Rival:
    """A `Cluster` before which someone else writes the job four times out of five that its status is about to be written."""

    def __init__(self, cluster: Cluster, other: Cluster) -> None:
        self._cluster = cluster
        self._other = other
        self._met = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def patch(
        self, kind: kinds.Kind, namespace: str, name: str, body: Any, *, subresource: str | None = None
    ) -> Any:
        if (kind, subresource) == (kinds.RLJOB, "status"):
            self._met += 1
            if self._met % 5:
                rivals = {"metadata": {"annotations": {"fight": str(self._met)}}}
                await self._other.patch(kind, namespace, name, rivals)
        return await self._cluster.patch(kind, namespace, name, body, subresource=subresource)


async def test_a_status_fought_over_is_written_all_the_same(jobs: Jobs, start, kubelet) -> None:
    replica = await start(wrap=lambda cluster: Rival(cluster, jobs.api))
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    await jobs.wait_condition("Scheduled", "True")
    await replica.settle()
    assert replica.writes()["PATCH", "rljobs", "409"] >= 2 * 4, "the first status, and the one with the pods bound"
    assert replica.writes()["POST", "pods", "201"] == 4
    assert replica.operator.metrics.registry.get_sample_value("rljob_operator_queue_retries_total") == 0
