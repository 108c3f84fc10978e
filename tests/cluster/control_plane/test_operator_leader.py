"""Two replicas and a Lease: one acts, the other watches, and takes over when the first is killed."""

import asyncio
import signal

import pytest

from rljob_operator import kinds
from rljob_operator.errors import NotFound
from rljob_operator.runtime.leader import NAME, LeaseLost
from tests.cluster.operator_rig.jobs import PATIENCE, STANDARD, Jobs, until
from tests.cluster.operator_rig.replica import home_of


async def holder(jobs: Jobs) -> str:
    return (await jobs.api.read(kinds.LEASE, home_of(jobs.namespace), NAME))["spec"]["holderIdentity"]


async def leads(jobs: Jobs, identity: str) -> None:
    """Return when that replica holds the Lease, which may not be there yet."""

    async def held() -> bool:
        try:
            return await holder(jobs) == identity
        except NotFound:
            return False

    await until(held, f"{identity} to hold the Lease")


async def test_one_of_two_acts_and_the_other_takes_over_when_it_stops(jobs: Jobs, start, kubelet) -> None:
    first = await start(identity="first", lease_seconds=15.0)
    await leads(jobs, "first")
    second = await start(identity="second", lease_seconds=15.0)
    await jobs.create()
    await jobs.wait_pods(*STANDARD)

    async def warm() -> bool:
        sizes = second.operator.cache.sizes()
        return (sizes["rljobs"], sizes["pods"]) == (1, 4)

    await until(warm, "the standby to have seen the job and its pods")
    assert second.writes() == {} and second.operator.queue.delayed == 0
    await first.stop()
    await leads(jobs, "second")
    uid = await jobs.delete_pod("job-env-0")

    async def replaced() -> bool:
        pods = await jobs.pods()
        return "job-env-0" in pods and pods["job-env-0"]["metadata"]["uid"] != uid

    await until(replaced, "a new job-env-0")


async def test_a_leader_whose_lease_is_taken_ends(jobs: Jobs, start) -> None:
    first = await start(identity="first", lease_seconds=3.0)
    await leads(jobs, "first")
    await jobs.api.patch(kinds.LEASE, home_of(jobs.namespace), NAME, {"spec": {"holderIdentity": "another"}})
    with pytest.raises(BaseExceptionGroup) as error:
        await asyncio.wait_for(first.task, PATIENCE)
    assert error.group_contains(LeaseLost)
    assert await holder(jobs) == "another"


async def test_a_standby_process_goes_on_where_a_killed_leader_stopped(jobs: Jobs, process, kubelet) -> None:
    first, log = process("first", LEASE_SECONDS="9")
    await until(lambda: asyncio.to_thread(lambda: "the cache is filled" in log.read_text()), "the first replica")
    await leads(jobs, "first")
    process("second", LEASE_SECONDS="9")
    await jobs.create()
    before = await jobs.wait_pods(*STANDARD)
    first.kill()
    uid = await jobs.delete_pod("job-rollout-0")

    async def replaced() -> bool:
        pods = await jobs.pods()
        return "job-rollout-0" in pods and pods["job-rollout-0"]["metadata"]["uid"] != uid

    await until(replaced, "a new job-rollout-0")
    after = await jobs.wait_pods(*STANDARD)
    assert {n for n in STANDARD if before[n]["metadata"]["uid"] != after[n]["metadata"]["uid"]} == {"job-rollout-0"}
    assert await holder(jobs) == "second"


async def test_a_process_told_to_stop_ends_well_and_gives_the_lease_back(jobs: Jobs, process) -> None:
    one, log = process("one")
    await until(lambda: asyncio.to_thread(lambda: "the cache is filled" in log.read_text()), "the replica")
    await leads(jobs, "one")
    one.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(one.wait, PATIENCE) == 0, log.read_text()
    assert await holder(jobs) == ""
    assert "Traceback" not in log.read_text()
