"""An API server that goes away, forgets, or is fought over: the operator finds its way back and does nothing twice."""

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

from operator_rig.jobs import STANDARD, Jobs, until
from testcluster.access import Access

from rljob_operator import kinds
from rljob_operator.errors import ApiError

STARTER = ThreadPoolExecutor(max_workers=1)
"""Programs of the cluster die with the thread that started them, so that thread lives as long as the session."""


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

    await until(look, f"a new {name}", patience=120.0)


async def test_a_restarted_api_server_is_found_again(control_plane: Access, jobs: Jobs, start, kubelet) -> None:
    replica = await start(lease_seconds=60.0)
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
    """The operator stands still, its watch's revision is compacted away: no DELETED comes, our own list finds the gap (protocol.md 7)."""
    operator, log = process("stopped", LEADER_ELECT="false", LOG_LEVEL="DEBUG")
    await jobs.create()
    before = await jobs.wait_pods(*STANDARD)
    await asyncio.sleep(2.0)
    operator.send_signal(signal.SIGSTOP)
    await restart_api_server(control_plane)  # its watches are cut, and it cannot begin new ones
    uid = await jobs.delete_pod("job-env-0", now=True)
    await restart_api_server(control_plane, compact=True)
    assert "job-env-0" not in await jobs.pods()
    operator.send_signal(signal.SIGCONT)
    await replaced(jobs, "job-env-0", uid)
    after = await jobs.wait_pods(*STANDARD)
    assert {n for n in STANDARD if before[n]["metadata"]["uid"] != after[n]["metadata"]["uid"]} == {"job-env-0"}
    assert "found objects gone without an event" in log.read_text()


async def test_a_status_fought_over_is_written_all_the_same(jobs: Jobs, start, kubelet) -> None:
    """Someone writes the job's annotations all the time, so that every resourceVersion is stale at once."""
    replica = await start()
    fighting = True

    async def fight() -> None:
        number = 0
        while fighting:
            number += 1
            with contextlib.suppress(ApiError):
                body = {"metadata": {"annotations": {"fight": str(number)}}}
                await jobs.api.patch(kinds.RLJOB, jobs.namespace, "job", body)

    await jobs.create()
    fighters = [asyncio.create_task(fight()) for _ in range(4)]
    try:
        await jobs.wait_pods(*STANDARD)
        await jobs.wait_condition("Scheduled", "True")
    finally:
        fighting = False
        await asyncio.gather(*fighters)
    await replica.settle()
    assert replica.writes()["POST", "pods", "201"] == 4
    assert replica.operator.metrics.registry.get_sample_value("rljob_operator_queue_retries_total") == 0
