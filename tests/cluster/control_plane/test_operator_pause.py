"""A job that a rule pauses stays paused through scaling and edits, and `rljob resume` lets it go on from the last good step."""

import asyncio
import json
import os
import subprocess
import sys

from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.runner import FakeRunner
from tests.cluster.testcluster.access import Access

POLICY = {"klBlowUp": {"above": 0.5, "steps": 2, "action": "Pause"}}


async def test_a_paused_job_names_its_last_good_step_and_only_resume_ends_the_pause(
    control_plane: Access, jobs: Jobs, start, kubelet: Kubelet
) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=7, policyVersion=7) as runner:
        replica = await start()
        await jobs.create(failurePolicy=POLICY)
        await jobs.wait_phase("Running")
        runner.status["streaks"] = {"klBlowUp": 2}

        async def told() -> bool:
            return {"reason": "rollback"} in runner.told("POST /finish")

        await until(told, "POST /finish")
        last = runner.status | {"phase": "Failed", "checkpoint": {"lastStep": 4, "path": "/runs/step-00000004"}}
        await kubelet.end("job-actor-0", code=3, message=json.dumps({"reason": "rolled back", "summary": last}))
        await jobs.wait_condition("Suspended", "True", "Paused")
        await jobs.change({"rollout": {"replicas": 1}})
        await replica.settle()
        status = (await jobs.get())["status"]
        assert status["phase"] == "Suspended" and not await jobs.pods()
        assert (status["halt"]["rule"], status["halt"]["lastGoodStep"]) == ("KlBlowUp", 4)
        assert "the last good checkpoint is at step 4" in (await jobs.condition("Suspended"))[2]

        runner.status |= {"streaks": {}, "epoch": 2}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "rl_core.cli.main", "resume", "job", "-n", jobs.namespace],
            env={**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        await jobs.wait_pods(*STANDARD[:2], "job-env-0")
        status = (await jobs.wait_phase("Running"))["status"]
        assert "halt" not in status and status["epoch"] == 2 and status["restarts"] == 0
