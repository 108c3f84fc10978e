"""A restarted operator and an idle one write nothing; one that finds its master key lost or changed keeps to the jobs' keys."""

import asyncio
import base64
from typing import Any

import pytest

from rljob_operator import kinds
from rljob_operator.errors import NotFound
from rljob_operator.runtime import master_key
from tests.cluster.operator_rig.jobs import PATIENCE, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.replica import home_of
from tests.cluster.operator_rig.runner import FakeRunner

READY = {"actor": 1, "rollout": 2, "env": 1}


async def test_a_restarted_operator_writes_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=3, policyVersion=3):
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
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=3, policyVersion=3) as runner:
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

        async def rules() -> Any:
            return (await jobs.api.read(kinds.NETWORK_POLICY, jobs.namespace, "job-env"))["spec"]

        closed, applies = await rules(), ("PATCH", "networkpolicies", "200")
        await jobs.api.patch(kinds.NETWORK_POLICY, jobs.namespace, "job-env", {"spec": {"ingress": [{}]}})

        async def closed_again() -> bool:
            return bool(await rules() == closed)

        await until(closed_again, "the rules of the policy that was opened")
        await replica.settle(quiet=3.0)
        assert replica.writes()[applies] == before.get(applies, 0) + 1, "one apply, after which there is no difference"


async def test_a_lost_master_key_is_not_made_anew_and_a_changed_one_leaves_running_jobs_theirs(
    jobs: Jobs, start, kubelet: Kubelet
) -> None:
    home, new = home_of(jobs.namespace), bytes(32)
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=3, policyVersion=3) as runner:
        first = await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await first.stop()
        secret: dict[str, Any] = await jobs.api.read(kinds.SECRET, home, master_key.NAME)
        old = base64.b64decode(secret["data"]["master"])
        await jobs.api.delete(kinds.SECRET, home, master_key.NAME, uid=secret["metadata"]["uid"])

        second = await start()
        with pytest.raises(BaseExceptionGroup) as error:
            await asyncio.wait_for(second.task, PATIENCE)
        assert error.group_contains(master_key.MasterKeyError, match="restore it from a backup")
        with pytest.raises(NotFound):
            await jobs.api.read(kinds.SECRET, home, master_key.NAME)

        data = {"master": base64.b64encode(new).decode(), "before": base64.b64encode(old).decode()}
        await jobs.api.create(kinds.SECRET, home, {"metadata": {"name": master_key.NAME}, "data": data})
        runner.status["step"] = 9  # told only to who signs with the key that the job's Secret is made of
        await start()

        async def heard() -> bool:
            return (await jobs.get())["status"].get("step") == 9

        await until(heard, "the runner's step")
        assert (await jobs.get())["status"]["keyId"] == master_key.key_id(old)
        await jobs.create("other")
        await jobs.wait_condition("Accepted", "True", "SpecAccepted", name="other")
        assert (await jobs.get("other"))["status"]["keyId"] == master_key.key_id(new)
