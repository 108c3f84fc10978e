"""The number of rollouts on the real API server: by rollout.autoscale from the runner's word, and by the manifests that users apply."""

from pathlib import Path

import pytest
import yaml

from rljob_operator import kinds
from rljob_operator.runtime.metrics import WORKLOAD
from tests.cluster.operator_rig.jobs import IMAGE, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.runner import FakeRunner
from tests.cluster.testcluster.access import Access

EXAMPLE = Path(__file__).parents[3] / "examples" / "autoscaling"

AUTOSCALE = {"min": 1, "max": 4, "targetIdle": 0.2}


def workload(count: int, *, starved: float, trainer: float) -> dict:
    """Return a whole window of `count` rollouts, as a runner tells it."""
    rollouts = [{"name": f"rollout:{index}", "busy": 1 - starved, "starved": starved} for index in range(count)]
    return {"full": True, "seconds": 60.0, "starved": starved, "actorStarved": trainer, "rollouts": rollouts}


async def replicas(jobs: Jobs) -> int:
    return int((await jobs.get())["spec"]["rollout"]["replicas"])


async def test_rollouts_follow_the_runners_numbers_and_a_person_wins(jobs: Jobs, start, kubelet: Kubelet) -> None:
    taken = {"step": 1, "appliedGeneration": 99}  # it has taken every edit
    async with FakeRunner(jobs, address=kubelet.address("job-actor-0"), **taken) as runner:
        replica = await start()
        await jobs.create(rollout={"autoscale": AUTOSCALE})
        await jobs.wait_phase("Running")
        runner.status["workload"] = workload(2, starved=0.01, trainer=0.6)

        async def doubled() -> bool:
            return await replicas(jobs) == 4

        await until(doubled, "four rollouts wanted")
        others = ("job-actor-0", "job-env-0")
        await jobs.wait_pods(*others, *(f"job-rollout-{index}" for index in range(4)))

        async def told() -> list:
            return await jobs.events("Autoscaled")

        (event,) = await until(told, "the event")
        assert "rollout.replicas 2 -> 4" in event["message"] and "60%" in event["message"]

        await jobs.api.patch(kinds.RLJOB, jobs.namespace, "job", {"spec": {"replicas": 3}}, subresource="scale")
        runner.status["workload"] = workload(4, starved=0.9, trainer=0.0)  # of the size before the person's word
        runner.status["members"] = [{"pod": "job-rollout-3", "state": "drained"}]
        await jobs.wait_pods(*others, *(f"job-rollout-{index}" for index in range(3)))
        await replica.settle()
        assert await replicas(jobs) == 3

        runner.status["members"] = [{"pod": "job-rollout-2", "state": "drained"}]
        runner.status["workload"] = workload(3, starved=0.9, trainer=0.0)

        async def halved() -> bool:
            return await replicas(jobs) == 2

        await until(halved, "idle rollouts to go")
        await jobs.wait_pods(*others, "job-rollout-0", "job-rollout-1")

        await jobs.change({"suspend": True})
        runner.status["workload"] = workload(2, starved=0.0, trainer=0.9)
        await replica.settle()
        assert await replicas(jobs) == 2, "a suspended job is left alone"


def example(name: str) -> dict:
    return yaml.safe_load((EXAMPLE / name).read_text())


async def test_the_example_of_an_hpa_drives_the_scale_of_a_job(
    control_plane: Access, jobs: Jobs, start, kubelet: Kubelet
) -> None:
    """Without a server of metrics an HPA still keeps its own bounds: the controller of the real control plane writes `/scale`."""
    await start()
    hpa = example("hpa.yaml")
    target = hpa["spec"]["scaleTargetRef"]["name"]
    await jobs.create(target, rollout={"image": IMAGE, "replicas": 1, "maxReplicas": 4})
    await jobs.wait_pods(*(f"{target}-{role}-0" for role in ("actor", "rollout", "env")), name=target)
    hpa["spec"]["minReplicas"] = 3
    control_plane.apply(hpa, namespace=jobs.namespace)

    async def scaled() -> bool:
        return (await jobs.get(target))["spec"]["rollout"]["replicas"] == 3

    await until(scaled, "three rollouts wanted by the HPA")
    pods = (f"{target}-{name}" for name in ("actor-0", "rollout-0", "rollout-1", "rollout-2", "env-0"))
    await jobs.wait_pods(*pods, name=target)
    shown = await jobs.api.read(kinds.RLJOB, jobs.namespace, f"{target}/scale")
    found = await jobs.list(kinds.POD, selector=shown["status"]["selector"])
    assert len(found) == 3 and all("-rollout-" in pod["metadata"]["name"] for pod in found), "the selector of the HPA"


@pytest.mark.parametrize("name", ["hpa.yaml", "keda.yaml"])
def test_the_examples_name_a_job_bounds_it_allows_and_a_metric_that_there_is(name: str) -> None:
    document = example(name)
    spec = document["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": kinds.RLJOB.api_version, "kind": "RLJob", "name": "arithmetic"}
    metrics = {family for family, _ in WORKLOAD.values()}
    if name == "hpa.yaml":
        assert spec["minReplicas"] >= 1 and spec["metrics"][0]["external"]["metric"]["name"] in metrics
        return
    assert (document["apiVersion"], document["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    assert set(spec) == {
        "scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "triggers", "advanced",
    }  # fmt: skip
    assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"], (
        "KEDA would take a job to 0, which its schema refuses"
    )
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "Value")
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"} and float(
        trigger["metadata"]["threshold"]
    )
    assert any(f"{metric}{{" in trigger["metadata"]["query"] for metric in metrics)
    assert set(spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]) == {"scaleUp", "scaleDown"}
