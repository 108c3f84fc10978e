"""The runner's word in the job's status: step and reward as they come, its silence told once, its end believed, control calls passed on."""

import asyncio
import json

from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.runner import FakeRunner


async def test_step_and_reward_come_from_the_runner(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=1, policyVersion=1, reward=0.25) as runner:
        await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        runner.status |= {"step": 7, "policyVersion": 7, "reward": 0.5}

        async def told() -> bool:
            status = (await jobs.get())["status"]
            return (status.get("step"), status.get("policyVersion"), status.get("reward")) == (7, 7, 0.5)

        await until(told, "step 7 in the status")


async def test_progress_is_written_at_most_once_per_interval(jobs: Jobs, start, kubelet: Kubelet) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=1, policyVersion=1) as runner:
        replica = await start(progress_seconds=2.0, poll_seconds=0.1)
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.wait_roles("ready", actor=1, rollout=2, env=1)
        await replica.settle()  # from here on only progress is written
        before, loop = replica.writes()["PATCH", "rljobs", "200"], asyncio.get_running_loop()
        began = loop.time()
        while loop.time() - began < 8.0:
            runner.status["step"] += 1
            await asyncio.sleep(0.1)
        writes = replica.writes()["PATCH", "rljobs", "200"] - before
        assert 1 <= writes <= (loop.time() - began) / 2.0 + 1


async def test_a_change_of_the_spec_is_passed_to_the_runner_and_its_answer_shown(
    jobs: Jobs, start, kubelet: Kubelet
) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=1, appliedGeneration=1) as runner:
        await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.change({"algorithm": {"steps": 99}})

        async def told() -> list:
            return runner.told("PUT /control")

        body = (await until(told, "PUT /control"))[0]
        assert body["generation"] == 2 and body["spec"]["algorithm"]["steps"] == 99
        runner.status["appliedGeneration"] = 2

        async def shown() -> bool:
            return (await jobs.get())["status"].get("appliedGeneration") == 2

        await until(shown, "appliedGeneration 2")


async def test_the_end_of_actor_0_completes_the_job_with_its_last_word(jobs: Jobs, start, kubelet: Kubelet) -> None:
    await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    summary = {"phase": "Done", "epoch": 1, "step": 20, "totalSteps": 20, "policyVersion": 20, "reward": 0.9}
    word = {"reason": "done", "process": "runner", "code": 0, "tail": "", "summary": summary}

    async def running() -> bool:
        return (await jobs.pods())["job-actor-0"]["status"]["phase"] == "Running"

    await until(running, "actor-0 to run")
    await kubelet.end("job-actor-0", code=0, message=json.dumps(word))
    status = (await jobs.wait_phase("Succeeded"))["status"]
    assert (status["step"], status["reward"]) == (20, 0.9)
    assert (await jobs.condition("Complete"))[0] == "True"


async def test_a_bad_configuration_fails_the_job_with_the_pods_own_words(jobs: Jobs, start, kubelet: Kubelet) -> None:
    await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)

    async def running() -> bool:
        return (await jobs.pods())["job-env-0"]["status"]["phase"] == "Running"

    await until(running, "env-0 to run")
    word = {
        "reason": "env.options.comparator must be exact",
        "process": "env-0",
        "code": 2,
        "tail": "last line",
        "summary": None,
    }
    await kubelet.end("job-env-0", code=2, message=json.dumps(word))
    await jobs.wait_phase("Failed")
    assert "env.options.comparator must be exact" in (await jobs.condition("Failed"))[2]


async def test_suspend_asks_the_runner_and_frees_the_pods_and_resume_makes_them_anew(
    jobs: Jobs, start, kubelet: Kubelet
) -> None:
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=5, policyVersion=5) as runner:
        await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.change({"suspend": True})

        async def asked() -> list:
            return runner.told("POST /finish")

        assert (await until(asked, "POST /finish"))[0] == {"reason": "suspend"}
        await kubelet.end("job-actor-0", code=0)
        await jobs.wait_phase("Suspended")
        await jobs.wait_pods()
        runner.status |= {"epoch": 2}
        await jobs.change({"suspend": False})
        pods = await jobs.wait_pods(*STANDARD)
        assert pods["job-actor-0"]["metadata"]["labels"]["rljob.dev/epoch"] == "2"
        assert (await jobs.wait_phase("Running"))["status"]["restarts"] == 0


async def test_scaling_down_drains_before_it_deletes(jobs: Jobs, start, kubelet: Kubelet) -> None:
    members = [
        {"pod": f"job-rollout-{n}", "name": f"rollout-{n}", "role": "rollout", "index": n, "state": "serving"}
        for n in (0, 1)
    ]
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=5, members=members) as runner:
        await start()
        await jobs.create()
        await jobs.wait_phase("Running")
        await jobs.change({"rollout": {"replicas": 1}})

        async def asked() -> list:
            return runner.told("POST /drain")

        assert (await until(asked, "POST /drain"))[0] == {"pods": ["job-rollout-1"]}
        assert "job-rollout-1" in await jobs.pods(), "it hands back its work first"
        runner.status["members"] = [members[0], {**members[1], "state": "drained"}]
        await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-env-0")


async def test_a_silent_runner_is_told_of_and_costs_the_job_nothing(jobs: Jobs, start, kubelet: Kubelet) -> None:
    replica = await start()
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), step=5):
        await jobs.create()
        await jobs.wait_phase("Running")
        pods = await jobs.pods()
    await asyncio.sleep(2.0)
    assert {n: p["metadata"]["uid"] for n, p in (await jobs.pods()).items()} == {
        n: p["metadata"]["uid"] for n, p in pods.items()
    }
    assert (await jobs.get())["status"]["step"] == 5
    assert replica.operator.metrics.registry.get_sample_value("rljob_operator_queue_retries_total") == 0
