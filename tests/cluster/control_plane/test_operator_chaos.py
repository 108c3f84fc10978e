"""An API server that goes away, forgets, or is fought over: the operator finds its way back and does nothing twice."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from operator_rig.jobs import STANDARD, Jobs, until
from testcluster.access import Access

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
