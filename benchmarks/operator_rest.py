"""What the operator holds and asks for with many jobs at rest, by number of jobs. JSON on standard output.

    operator_rest.py [JOBS ...]

The operator is a process of its own before an API server in memory (`_fake_api.py`); each job runs with 8 pods and its runner answers
every poll alike, so nothing is to be done. Memory per job is the slope between the numbers of jobs; 10,000 jobs are told by it.
"""

import asyncio
import copy
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _fake_api import MASTER, FakeApi

from rl_core.api.job import API_VERSION
from rljob_operator.model import Object, OperatorConfig, Progress
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.runtime import master_key
from rljob_operator.times import to_text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from _fake_runner import STATUS  # noqa: E402

START = 1_760_000_000.0
ROLLOUTS, ENVS = 4, 3
SETTLE_SECONDS, REST_SECONDS = 8.0, 12.0
MANY = 10_000
CONFIG = OperatorConfig(images=dict.fromkeys(("actor", "rollout", "env"), "none"), key_id=master_key.key_id(MASTER))
ENVIRONMENT = {
    "RLJOB_OPERATOR_IMAGE_ACTOR": "none",
    "RLJOB_OPERATOR_IMAGE_ROLLOUT": "none",
    "RLJOB_OPERATOR_IMAGE_ENV": "none",
    "RLJOB_OPERATOR_METRICS_HOST": "127.0.0.1",
    "RLJOB_OPERATOR_METRICS_PORT": "0",
    "RLJOB_OPERATOR_LOG_LEVEL": "WARNING",
}


def settled(index: int) -> list[Object]:
    """Return a running job with its pods and objects, of which nothing is to be changed."""
    job = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": f"job-{index}", "namespace": "bench", "uid": f"{index:08d}-job", "generation": 1},
        "spec": {
            "model": {"path": "/model"},
            "data": {"train": "/data/train.jsonl"},
            "algorithm": {"promptsPerStep": 8, "groupSize": 4, "steps": 1000},
            "rollout": {"replicas": ROLLOUTS, "maxReplicas": 64},
            "env": {"type": "math", "replicas": ENVS},
        },
    }
    job["metadata"] |= {"resourceVersion": "1", "creationTimestamp": to_text(START)}
    pods: dict[str, Object] = {}
    objects: dict[tuple[str, str], Object] = {}
    known = ParsedJob()
    for _ in range(8):
        first = pods.get(f"job-{index}-actor-0")
        word = Progress(status=STATUS, at=START, pod_uid=first["metadata"]["uid"]) if first is not None else None
        observed = pod_views.observe(pods=list(pods.values()), objects=list(objects.values()), progress=word)
        plan = reconcile(job, observed, START, config=CONFIG, known=known)
        if plan.status is None and not plan.create and not plan.ensure:
            return [job, *pods.values(), *objects.values()]
        job["status"] = json.loads(json.dumps(plan.status)) if plan.status is not None else job["status"]
        for obj in plan.ensure:
            objects[obj["kind"], obj["metadata"]["name"]] = stored(obj)
        for pod in plan.create:
            pods[pod["metadata"]["name"]] = stored(pod) | {"status": running(pod)}
    raise RuntimeError(f"job {index} does not come to rest: {plan}")


def stored(obj: Object) -> dict:
    """Return an object as an API server gives it back."""
    made = copy.deepcopy(dict(obj))
    uid = f"{made['kind']}-{made['metadata']['name']}"
    made["metadata"] |= {"uid": uid, "resourceVersion": "1", "creationTimestamp": to_text(START)}
    if made["kind"] == "Pod":
        made["spec"]["nodeName"] = "node"
    return made


def running(pod: Object) -> dict:
    """Return the status of a pod that serves."""
    conditions = [
        {"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    states = [{"name": one["name"], "state": {"running": {}}, "ready": True} for one in pod["spec"]["containers"]]
    status = {"phase": "Running", "podIP": "127.0.0.1", "startTime": to_text(START)}
    return status | {"conditions": conditions, "containerStatuses": states}


async def measure(count: int, objects: list[Object], folder: Path) -> dict:
    """Run the operator over `count` jobs at rest; what it took and asked."""
    async with FakeApi(objects) as api:
        kubeconfig = folder / f"kubeconfig-{count}"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        parts = {"clusters": [cluster], "users": [{"name": "u", "user": {"token": "t"}}], "contexts": [context]}
        kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **parts}))
        environment = {**os.environ, **ENVIRONMENT, "KUBECONFIG": str(kubeconfig)}
        operator = psutil.Popen([sys.executable, "-m", "rljob_operator"], env=environment)
        try:
            while not api.asked["POST", "leases"]:
                await asyncio.sleep(0.2)
                if operator.poll() is not None:
                    raise RuntimeError(f"the operator ended with code {operator.returncode}")
            await asyncio.sleep(SETTLE_SECONDS + count / 100)  # every job is looked at once, most are polled
            before, cpu, begin = api.asked.copy(), busy(operator), time.perf_counter()
            await asyncio.sleep(REST_SECONDS)
            took = time.perf_counter() - begin
            asked = {" ".join(key): number for key, number in (api.asked - before).items()}
            memory, cores = operator.memory_info().rss / 2**20, (busy(operator) - cpu) / took
        finally:
            operator.kill()  # its last word to the API server would wait for us
            operator.wait()
    writes = {" ".join(key): n for key, n in api.asked.items() if key[0] not in ("LIST", "WATCH", "GET")}
    return {
        "jobs": count,
        "memory_mib": round(memory, 1),
        "cores": round(cores, 3),
        "asked_at_rest": asked,
        "writes": writes,
    }


def busy(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def main(counts: list[int]) -> None:
    """Measure each number of jobs, print the slope."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as name:
        folder = Path(name)
        (folder / "master").write_bytes(MASTER)
        runner = psutil.Popen([sys.executable, str(HERE / "_fake_runner.py"), str(folder / "master")])
        try:
            found = []
            jobs = [settled(index) for index in range(max(counts))]
            for count in counts:
                found.append(await measure(count, [obj for job in jobs[:count] for obj in job], folder))
                print(json.dumps(found[-1]), file=sys.stderr)
        finally:
            runner.terminate()
            runner.wait()
    kib = (found[-1]["memory_mib"] - found[0]["memory_mib"]) * 1024 / (counts[-1] - counts[0])
    whole = found[0]["memory_mib"] + kib * (MANY - counts[0]) / 1024
    result = {"runs": found, "kib_per_job": round(kib, 1), f"memory_mib_of_{MANY}": round(whole)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main([int(one) for one in sys.argv[1:]] or [300, 1500]))
