"""A job on two real nodes: from `kubectl apply` to the first step and to the end, and the way back after each kind of death.

    sudo .venv/bin/python benchmarks/cluster_job.py        (root; starts and removes its own cluster; about 6 minutes)

One JSON object on standard output, seconds. `detected`: the operator's status or a new pod shows it; `recovered`: as many rollouts as before
serve (for the actor: a step after the newest checkpoint is done).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.jobs_on_nodes import Job, example, is_ready, small  # noqa: E402
from tests.cluster.testcluster.access import Access  # noqa: E402
from tests.cluster.testcluster.cluster import Cluster  # noqa: E402

NAMESPACE = "bench"
PATIENCE = 600.0


class Clock:
    """Seconds since its making."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return round(time.monotonic() - self._start, 1)


def timed(action: Callable[[], object]) -> float:
    clock = Clock()
    action()
    return clock()


def install(access: Access) -> dict[str, float]:
    """Build, push and install; return what each took."""
    command = [sys.executable, "-m", "worker_images.build"]
    found = {"build_images": timed(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL))}
    registry = access.cluster.state.addresses.registry
    clock = Clock()
    done = subprocess.run([*command, "--push", registry], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found["push_images"] = clock()
    values = [word for role, image in json.loads(done.stdout).items() for word in ("--set", f"images.{role}={image}")]
    words = ("-n", "rljob-system", "--create-namespace", "--wait")
    found["helm_install"] = timed(lambda: access.helm("install", "rljob", ROOT / "helm" / "rljob", *words, *values))
    access.kubectl("create", "namespace", NAMESPACE)
    access.kubectl("wait", "--for=create", "serviceaccount/default", "-n", NAMESPACE, "--timeout=30s")
    return found


def run_to_end(access: Access) -> dict[str, float]:
    """Apply the example as it is and follow it: the first time nodes pull the images and the model is made."""
    claim, manifest = example()
    access.apply(claim, namespace=NAMESPACE)
    job, clock = Job(access, NAMESPACE, "arithmetic"), Clock()
    job.apply(manifest)
    found = {}
    job.wait_pod("arithmetic-actor-0", "prepared", lambda pod: initialized(pod), seconds=PATIENCE)
    found["apply_to_prepared"] = clock()
    job.wait("first step", lambda status: status.get("step", 0) >= 1, seconds=PATIENCE)
    found["apply_to_first_step"] = clock()
    status = job.wait_phase("Succeeded", seconds=PATIENCE)
    return found | {"apply_to_succeeded": clock(), "reward": status["reward"]}


def initialized(pod: dict) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "Initialized" and each["status"] == "True" for each in conditions)


def start(access: Access) -> tuple[Job, dict[str, float]]:
    """Start a long job on the prepared volume, images being there."""
    job, clock = Job(access, NAMESPACE, "long"), Clock()
    job.apply(small("long", steps=1_000_000, failurePolicy={"maxRestarts": 10}))
    job.wait("first step", lambda status: status.get("step", 0) >= 1, seconds=PATIENCE)
    found = {"apply_to_first_step": clock()}
    job.wait("a checkpoint", lambda status: (status.get("checkpoint", {}).get("lastStep") or 0) >= 5, seconds=PATIENCE)
    return job, found


def killed(job: Job, pod: str) -> dict[str, float]:
    """Kill a rollout or env pod."""
    clock = Clock()
    uid = job.kill(pod)
    job.wait_pod(pod, "made again", lambda found: found["metadata"]["uid"] != uid, seconds=PATIENCE)
    found = {"detected": clock()}
    job.wait_replaced(pod, uid, seconds=PATIENCE)
    return found | {"recovered": clock()}


def killed_actor(job: Job) -> dict[str, float]:
    then, clock = job.status(), Clock()
    job.kill("long-actor-0")
    job.wait("a new epoch", lambda status: status["epoch"] > then["epoch"], seconds=PATIENCE)
    found = {"detected": clock()}
    saved = then["checkpoint"]["lastStep"]
    job.wait("steps", lambda status: status["phase"] == "Running" and status["step"] > saved, seconds=PATIENCE)
    return found | {"recovered": clock()}


def dead_node(job: Job) -> dict[str, float]:
    """Cut the power of the node without the actor."""
    pods = job.pods()
    home = pods["long-actor-0"]["spec"]["nodeName"]
    lost = next(name for name, pod in pods.items() if "rollout" in name and pod["spec"]["nodeName"] != home)
    uid, clock = pods[lost]["metadata"]["uid"], Clock()
    node = job.access.cluster.node(pods[lost]["spec"]["nodeName"])
    node.kill()
    words = ("--for=jsonpath={.status.conditions[?(@.type=='Ready')].status}=Unknown", f"--timeout={PATIENCE:.0f}s")
    job.access.kubectl("wait", f"node/{node.name}", *words)
    found = {"node_not_ready": clock()}
    job.wait_pod(lost, "made again", lambda pod: pod["metadata"]["uid"] != uid, seconds=PATIENCE)
    found["detected"] = clock()
    job.wait_pod(lost, "serves", lambda pod: pod["metadata"]["uid"] != uid and is_ready(pod), seconds=PATIENCE)
    return found | {"recovered": clock()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster, clock = Cluster.create(Path(folder, "cluster"), nodes=2, owner=os.getpid()), Clock()
        try:
            cluster.start_nodes()
            access, found = Access(cluster), {"cluster_up": clock()}
            found |= install(access)
            found["example"] = run_to_end(access)
            job, found["second_job"] = start(access)
            found["rollout_killed"] = killed(job, "long-rollout-0")
            found["env_killed"] = killed(job, "long-env-0")
            found["actor_killed"] = killed_actor(job)
            found["node_dead"] = dead_node(job)
            print(json.dumps(found, indent=1))
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
