"""Jobs that choose another trainer or another engine, on a random model that both nodes read from one volume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.jobs_on_nodes import FOREVER, SHARED, SPREAD, Job, finish, small
from tests.e2e.harness import assert_trained_once

MINUTES = 60.0
LORA = {"rank": 4, "alpha": 8}
GROUPS = 8
"""Of a step, in jobs that `small` makes."""
ENGINES = {
    "rollout__engine": "sglang",
    "rollout__replicas": 2,
    "rollout__minReplicas": 2,
    "rollout__topologySpreadConstraints": [],
    "rollout__resources": {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
}


def tiny(name: str, *, steps: int, **changes: Any) -> dict:
    """A job on the volume `shared`."""
    chosen = {
        "code": {"configMap": "letters"},
        "env": {"type": "reward", "reward": "reward:letter_a", "resources": {"requests": {"memory": "128Mi"}}},
        "actor__volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": SHARED}}],
        "actor__initContainers": [],
        "actor__optimizer__learningRate": 5.0e-3,
        "rollout__replicas": 1,
    }
    return small(name, steps=steps, **chosen | changes)


def both_are_ready(job: Job) -> None:
    """Wait until two rollouts serve."""
    job.wait(
        "both rollouts", lambda status: (status.get("rollout") or {}).get("readyReplicas") == 2, seconds=5 * MINUTES
    )


def test_a_megatron_layer_cut_over_two_nodes_survives_the_kill_of_a_pod_and_trains_every_group_once(
    shared: Path, submit: Callable[[dict], Job]
) -> None:
    actor = {"backend": "megatron", "parallel": {"tensor": 2}, "replicas": 2, "topologySpreadConstraints": SPREAD}
    job = submit(tiny("gang", steps=FOREVER, **{f"actor__{name}": value for name, value in actor.items()}))
    then = job.wait(
        "a checkpoint", lambda status: (status.get("checkpoint", {}).get("lastStep") or 0) >= 5, seconds=15 * MINUTES
    )
    before = job.pods("actor")
    assert len({pod["spec"]["nodeName"] for pod in before.values()}) == 2
    job.kill("gang-actor-1")
    job.wait("a new epoch", lambda status: status["epoch"] > then["epoch"], seconds=3 * MINUTES)
    for name, pod in before.items():
        job.wait_replaced(name, pod["metadata"]["uid"], seconds=9 * MINUTES)
    output = finish(job, shared, steps=60, restarts=then["totalRestarts"] + 1)
    lines = [line for line in output.lines("metrics.jsonl") if line["step"]]
    assert_trained_once(output, steps=lines[-1]["step"], groups=GROUPS)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5]), rewards
    assert lines[-1]["weights/content_check_passed_total"] > 0


def test_sglang_gets_adapters_beside_the_actor_in_its_pod_and_in_a_pod_of_its_own(
    shared: Path, submit: Callable[[dict], Job]
) -> None:
    """A hybrid job with LoRA: rollout 0 is a second container of the actor's pod and takes turns with it, rollout 1 has a pod."""
    job = submit(tiny("engine", steps=FOREVER, placement={"mode": "hybrid"}, model__lora=LORA, **ENGINES))
    both_are_ready(job)
    pods = {name: [one["name"] for one in pod["spec"]["containers"]] for name, pod in job.pods().items()}
    assert pods == {"engine-actor-0": ["actor", "rollout"], "engine-env-0": ["env"], "engine-rollout-1": ["rollout"]}
    output = finish(job, shared, steps=4, restarts=0)
    lines = output.lines("metrics.jsonl")
    assert_trained_once(output, steps=lines[-1]["step"], groups=GROUPS)
    assert lines[-1]["weights/content_check_passed_total"] > 0
