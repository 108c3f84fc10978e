"""How fast pods follow a change of a job: apply, lost pod, scale. JSON on standard output.

Times run from the request to the watch event of the last pod, on a real API server (docs/performance.md).
"""

import asyncio
import json
import time

from _operator_rig import JOBS, POD_PATH, Rig, job, machine, percentile, rig

NUM_JOBS = 50
NUM_DELETIONS = 50
NUM_SCALES = 5
ROLLOUTS, ENVS = 8, 7  # with the actor: 16 pods
SCALED = 64
NODES = 20


async def apply(run: Rig, name: str, *, rollouts: int, envs: int) -> float:
    """Seconds from the apply to the last pod."""
    begin = time.perf_counter()
    await run.api.request("POST", JOBS, job(name, rollouts=rollouts, envs=envs))
    await run.pods.wait(lambda: len(run.pods.seen.get(name, {})) == 1 + rollouts + envs, timeout_s=60)
    return max(at for _, at in run.pods.seen[name].values()) - begin


async def settle(run: Rig) -> None:
    """Wait until every job runs and nothing is queued."""
    async with asyncio.timeout(120):
        while set(await run.phases()) - {"Running"}:
            await asyncio.sleep(0.5)


async def replace(run: Rig, name: str, pod: str) -> float:
    """Seconds from the deletion of a pod to its replacement."""
    old, _ = run.pods.seen[name][pod]
    begin = time.perf_counter()
    await run.api.request("DELETE", f"{POD_PATH}/{pod}")
    await run.pods.wait(lambda: run.pods.seen[name][pod][0] != old, timeout_s=60)
    return run.pods.seen[name][pod][1] - begin


async def scale(run: Rig, name: str) -> float:
    """Seconds from a scale to 64 rollouts to the last of their pods."""
    begin = time.perf_counter()
    patch = {"spec": {"replicas": SCALED}}
    await run.api.request("PATCH", f"{JOBS}/{name}/scale", patch, Content_Type="application/merge-patch+json")
    await run.pods.wait(lambda: len(run.pods.seen[name]) == 1 + SCALED + ENVS, timeout_s=60)
    return max(at for _, at in run.pods.seen[name].values()) - begin


def summary(seconds: list[float]) -> dict:
    """Milliseconds."""
    parts = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: percentile(seconds, part) for name, part in parts.items()} | {"samples": len(seconds)}


async def main() -> None:
    async with rig(fake_nodes=NODES) as run:
        applied = [await apply(run, f"job-{index}", rollouts=ROLLOUTS, envs=ENVS) for index in range(NUM_JOBS)]
        await settle(run)
        roles = ("rollout", "env")
        replaced = [
            await replace(run, f"job-{index}", f"job-{index}-{roles[index % 2]}-{index % 7}")
            for index in range(NUM_DELETIONS)
        ]
        await settle(run)
        scaled = [await scale(run, f"job-{index}") for index in range(NUM_SCALES)]
        result = {
            "apply_16_pods_ms": summary(applied) | {"target_p50": 1000, "target_p99": 3000},
            "replace_pod_ms": summary(replaced) | {"target_p99": 2000},
            "scale_8_to_64_ms": summary(scaled) | {"target_worst": 4000},
            **machine(),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
