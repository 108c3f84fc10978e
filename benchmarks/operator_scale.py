"""1,000 jobs of 8 pods: from empty, through a restart of the operator, and at rest. JSON on standard output.

    operator_scale.py [JOBS]

Beside the pods per second that KubeRay publishes; see docs/performance.md.
"""

import asyncio
import json
import sys
import time

from _operator_rig import JOBS, KUBERAY_PODS_PER_SECOND, Rig, job, machine, rig

ROLLOUTS, ENVS = 4, 3  # with the actor: 8 pods
PODS_PER_NODE = 250
APPLIES_IN_FLIGHT = 8
IDLE_SECONDS = 120
LEASES = "leases"


async def create(run: Rig, count: int) -> dict:
    """Create the jobs; time until all pods are there, and until all jobs run."""
    slots = asyncio.Semaphore(APPLIES_IN_FLIGHT)

    async def one(index: int) -> None:
        async with slots:
            await run.api.request("POST", JOBS, job(f"job-{index}", rollouts=ROLLOUTS, envs=ENVS))

    pods = count * (1 + ROLLOUTS + ENVS)
    cpu, begin = run.operator.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(count)))
    applied = time.perf_counter() - begin
    await run.pods.wait(lambda: len(run.pods.owners) >= pods, timeout_s=900)
    created = time.perf_counter() - begin
    while (await run.phases()).get("Running", 0) < count:
        await asyncio.sleep(1)
        if time.perf_counter() - begin > 1200:
            raise TimeoutError(f"jobs by phase: {await run.phases()}")
    return {
        "jobs": count,
        "pods": pods,
        "applied_s": round(applied, 1),
        "created_s": round(created, 1),
        "running_s": round(time.perf_counter() - begin, 1),
        "target_s": 300,
        "pods_per_s": round(pods / created, 1),
        "kuberay_pods_per_s": KUBERAY_PODS_PER_SECOND,
        "operator_cpu_s": round(run.operator.cpu_seconds() - cpu, 1),
    } | await audit(run, pods)


async def audit(run: Rig, pods: int) -> dict:
    """Pods that should not be: more than wanted, or without a job that exists."""
    jobs = {item["metadata"]["uid"] for item in (await run.api.request("GET", JOBS))["items"]}
    return {
        "duplicates": len(run.pods.owners) - pods,
        "orphans": sum(run.pods.owners[uid] not in jobs for uid in run.pods.alive),
    }


async def restart(run: Rig, count: int) -> dict:
    """Restart the operator; time until it has looked at every job, and what it wrote."""
    run.operator.stop()
    begin = time.perf_counter()
    run.operator.start()
    looked = 'rljob_operator_reconcile_total{result="success"}'
    await run.operator.wait(lambda values: values.get(looked, 0) >= count, timeout_s=300)
    took = time.perf_counter() - begin
    await asyncio.sleep(10)
    return {"reconciled_s": round(took, 1), "target_s": 60, "writes": await writes(run)}


async def idle(run: Rig) -> dict:
    """What the operator takes when nothing happens."""
    await asyncio.sleep(60)  # every runner was polled once
    before, cpu = await run.operator.writes(), run.operator.cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    used, after = run.operator.cpu_seconds() - cpu, await run.operator.writes()
    changed = {key: value - before.get(key, 0) for key, value in after.items() if value > before.get(key, 0)}
    return {
        "cores": round(used / IDLE_SECONDS, 3),
        "target_cores": 0.1,
        "memory_mib": round(run.operator.memory_mib()),
        "target_memory_mib": 400,
        "writes": {key: value for key, value in changed.items() if LEASES not in key},
        "seconds": IDLE_SECONDS,
    }


async def writes(run: Rig) -> dict:
    """All writes since the operator's start but those of its Lease."""
    return {key: value for key, value in (await run.operator.writes()).items() if LEASES not in key}


async def main(count: int) -> None:
    async with rig(fake_nodes=2 + count * (1 + ROLLOUTS + ENVS) // PODS_PER_NODE) as run:
        result = machine()
        for part, figures in (
            ("from_empty", lambda: create(run, count)),
            ("restart", lambda: restart(run, count)),
            ("idle", lambda: idle(run)),
        ):
            result[part] = await figures()
            print(f"{part}: {json.dumps(result[part])}", file=sys.stderr)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
