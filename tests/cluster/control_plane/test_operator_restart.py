"""A restarted operator and an idle one write nothing."""

import asyncio

from operator_rig.jobs import Jobs
from operator_rig.kubelet import Kubelet
from operator_rig.runner import FakeRunner

READY = {"actor": 1, "rollout": 2, "env": 1}


async def test_a_restarted_operator_writes_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(address=kubelet.address("job-actor-0"), step=3, policyVersion=3):
        first = await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.wait_roles("ready", **READY)
        await first.settle(quiet=3.0)
        await first.stop()
        before = await jobs.get()
        second = await start()
        await second.settle(quiet=3.0)
        assert second.writes() == {}
        assert (await jobs.get())["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_an_idle_operator_writes_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(address=kubelet.address("job-actor-0"), step=3, policyVersion=3) as runner:
        replica = await start(resync_seconds=4.0)
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.wait_roles("ready", **READY)
        await replica.settle(quiet=3.0)
        before, polls = replica.writes(), runner.polls
        await asyncio.sleep(6.0)
        secrets = ("POST", "secrets", "409")
        changed = {key: n for key, n in replica.writes().items() if n != before.get(key) and key != secrets}
        assert changed == {}, "a resync asserts the Secret, which is there, and writes nothing else"
        assert runner.polls > polls
