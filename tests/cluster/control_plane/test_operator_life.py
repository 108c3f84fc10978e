"""A job's life on the real API server: made, repaired, scaled, deleted, made anew."""

import asyncio
from pathlib import Path

import pytest

from rl_core.plan.launch import PodPlan
from rljob_operator import kinds, naming
from rljob_operator.errors import Invalid
from tests.cluster.operator_rig.jobs import STANDARD, Jobs, until


def owner_of(obj):
    return [(o["kind"], o["name"], o["uid"], o.get("controller")) for o in obj["metadata"].get("ownerReferences", [])]


async def test_a_job_becomes_its_pods_and_what_they_need(jobs: Jobs, start) -> None:
    await start()
    job = await jobs.create()
    pods = await jobs.wait_pods(*STANDARD)
    uid = job["metadata"]["uid"]
    for pod in pods.values():
        assert owner_of(pod) == [("RLJob", "job", uid, True)]
    for kind, names in {
        kinds.SERVICE: {"job"},
        kinds.CONFIG_MAP: {"job-config"},
        kinds.NETWORK_POLICY: {"job-actor", "job-actor-0", "job-rollout", "job-env"},
        kinds.SECRET: {naming.secret("job", uid)},
    }.items():
        found = {o["metadata"]["name"]: o for o in await jobs.list(kind) if owner_of(o)}
        assert set(found) == names
        assert all(owner_of(o)[0][2] == uid for o in found.values())


async def test_the_pods_of_a_colocated_job_are_what_the_plan_says(jobs: Jobs, start) -> None:
    """A container each for actor and rollout, on one claim, with the keys of both; the rollouts have no other pods and cannot be scaled alone."""
    await start()
    shared = {"replicas": 2, "gpus": 1, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
    await jobs.create(placement={"mode": "colocated"}, actor=shared, rollout=shared)
    pods = await jobs.wait_pods("job-actor-0", "job-actor-1", "job-env-0")
    for index in (0, 1):
        spec = pods[f"job-actor-{index}"]["spec"]
        plans = {
            one["name"]: PodPlan.from_json(env["value"])
            for one in spec["containers"]
            for env in one["env"]
            if env["name"] == "RLJOB_POD_PLAN"
        }
        names = {name: [process.name for process in plan.containers[0].processes] for name, plan in plans.items()}
        services = ["runner", "channel"] if index == 0 else []
        assert names == {"actor": [*services, f"actor-{index}"], "rollout": [f"rollout-{index}"]}
        (claim,) = spec["resourceClaims"]
        assert [one["resources"]["claims"] for one in spec["containers"]] == [[{"name": claim["name"]}]] * 2
        (keys,) = (volume for volume in spec["volumes"] if volume["name"] == "rljob-keys")
        paths = {item["path"] for item in keys["projected"]["sources"][0]["secret"]["items"]}
        assert {"actor.secret", "rollout.secret"} <= paths
    await jobs.wait_roles("active", actor=2, rollout=2)
    with pytest.raises(Invalid, match="rollout.replicas must be actor.replicas with placement.mode colocated"):
        await jobs.change({"rollout": {"replicas": 1}})


async def test_deleting_a_job_leaves_nothing(jobs: Jobs, start, kubelet) -> None:
    await start()
    job = await jobs.create()
    await jobs.wait_phase("Starting")
    await jobs.delete()

    async def nothing() -> bool:
        left = [o for kind in (*kinds.OWNED, kinds.SECRET) for o in await jobs.list(kind) if owner_of(o)]
        return not [o for o in left if owner_of(o)[0][2] == job["metadata"]["uid"]]

    await until(nothing, "everything of the job gone")
    await jobs.wait_gone(kinds.RLJOB, "job")


async def test_the_policies_of_a_deleted_job_stay_until_its_pods_are_gone(
    jobs: Jobs, start, kubelet, account: Path
) -> None:
    """With the rights of the chart; a finalizer stands for the time that a pod takes to end."""
    await start(kubeconfig=account, watch_namespaces=(jobs.namespace,))
    await jobs.create()
    pods = await jobs.wait_pods(*STANDARD)
    await jobs.api.patch(kinds.POD, jobs.namespace, "job-env-0", {"metadata": {"finalizers": ["test.dev/ends"]}})
    await jobs.delete()

    async def only_the_env_pod() -> bool:
        others = [o for kind in (kinds.SERVICE, kinds.CONFIG_MAP) for o in await jobs.list(kind) if owner_of(o)]
        return sorted(await jobs.pods()) == ["job-env-0"] and not others

    await until(only_the_env_pod, "everything else gone")

    async def the_fence_alone() -> bool:
        left = {o["metadata"]["name"]: owner_of(o) for o in await jobs.list(kinds.NETWORK_POLICY)}
        return left == {"job-env": [("Pod", "job-env-0", pods["job-env-0"]["metadata"]["uid"], None)]}

    await until(the_fence_alone, "the policy of the pod that is left")
    await asyncio.sleep(2.0)
    assert await the_fence_alone()
    await jobs.api.patch(kinds.POD, jobs.namespace, "job-env-0", {"metadata": {"finalizers": None}})

    async def nothing() -> bool:
        return not await jobs.pods() and not await jobs.list(kinds.NETWORK_POLICY)

    await until(nothing, "the pod and its policy gone")


async def test_no_object_carries_annotations_or_finalizers_of_the_framework(jobs: Jobs, start, kubelet) -> None:
    await start()
    await jobs.create()
    await jobs.wait_phase("Starting")
    for obj in [await jobs.get(), *(await jobs.pods()).values(), *await jobs.list(kinds.SERVICE)]:
        assert not obj["metadata"].get("finalizers"), obj["metadata"]["name"]
        assert not [key for key in obj["metadata"].get("annotations", {}) if "kopf" in key]


@pytest.mark.parametrize("name", ["job-rollout-1", "job-env-0"])
async def test_a_deleted_pod_is_replaced(jobs: Jobs, start, kubelet, name: str) -> None:
    await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    uid = await jobs.delete_pod(name)

    async def replaced() -> bool:
        pods = await jobs.pods()
        return name in pods and pods[name]["metadata"]["uid"] != uid

    await until(replaced, f"a new {name}")
    pods = await jobs.wait_pods(*STANDARD)
    assert {pod["metadata"]["labels"][naming.LABEL_EPOCH] for pod in pods.values()} == {"1"}


async def test_a_deleted_actor_restarts_the_gang_under_a_new_epoch(jobs: Jobs, start, kubelet) -> None:
    await start()
    await jobs.create(actor={"replicas": 2})
    names = (*STANDARD, "job-actor-1")
    before = await jobs.wait_pods(*names)
    await jobs.wait_roles("active", actor=2)  # a rank that no status has counted is made, not missed
    await jobs.delete_pod("job-actor-1")

    async def restarted() -> bool:
        return (await jobs.get())["status"].get("epoch") == 2 and len(await jobs.pods(role="actor")) == 2

    await until(restarted, "epoch 2")
    after = await jobs.wait_pods(*names)
    uids = {name: (before[name]["metadata"]["uid"], after[name]["metadata"]["uid"]) for name in names}
    assert all(old != new for name, (old, new) in uids.items() if "actor" in name)
    assert all(old == new for name, (old, new) in uids.items() if "actor" not in name), "rollouts and envs stay"
    assert {after[f"job-actor-{rank}"]["metadata"]["labels"][naming.LABEL_EPOCH] for rank in (0, 1)} == {"2"}
    status = (await jobs.get())["status"]
    assert (status["restarts"], status["totalRestarts"]) == (0, 1), "somebody else's deletion is a disruption"


async def test_scaling_by_the_scale_subresource(jobs: Jobs, start, kubelet) -> None:
    await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)

    async def scale(replicas: int) -> None:
        await jobs.api.patch(kinds.RLJOB, jobs.namespace, "job", {"spec": {"replicas": replicas}}, subresource="scale")

    rest = [name for name in STANDARD if "rollout" not in name]
    await scale(6)
    await jobs.wait_pods(*rest, *(f"job-rollout-{index}" for index in range(6)))
    await scale(3)
    await jobs.wait_pods(*rest, *(f"job-rollout-{index}" for index in range(3)))
    shown = await jobs.api.read(kinds.RLJOB, jobs.namespace, "job/scale")
    assert shown["status"]["selector"] == naming.group_selector("job", "rollout")


async def test_a_job_made_anew_at_once_has_its_own_pods(jobs: Jobs, start, kubelet) -> None:
    await start()
    first = await jobs.create()
    await jobs.wait_pods(*STANDARD)
    await jobs.delete()
    second = await jobs.create()
    assert first["metadata"]["uid"] != second["metadata"]["uid"]

    async def own() -> bool:
        pods = await jobs.pods()
        return sorted(pods) == sorted(STANDARD) and all(
            owner_of(pod)[0][2] == second["metadata"]["uid"] for pod in pods.values()
        )

    await until(own, "the second job's pods")
    for kind in (kinds.SERVICE, kinds.CONFIG_MAP, kinds.NETWORK_POLICY, kinds.SECRET):

        async def own_objects(kind=kind) -> bool:
            owned = [o for o in await jobs.list(kind) if owner_of(o)]
            return bool(owned) and all([o[2] for o in owner_of(obj)] == [second["metadata"]["uid"]] for obj in owned)

        await until(own_objects, f"every {kind.kind} is the second job's")


async def test_a_job_deleted_while_it_starts_leaves_nothing(jobs: Jobs, start, kubelet) -> None:
    replica = await start()
    await jobs.create(rollout={"replicas": 20})
    await until(jobs.pods, "the first pods")
    await jobs.delete()
    await jobs.wait_gone(kinds.RLJOB, "job")
    await replica.settle()  # what was on its way when the job went is there by then

    async def nothing() -> bool:
        left = [o for kind in (*kinds.OWNED, kinds.SECRET) for o in await jobs.list(kind) if owner_of(o)]
        return not left

    await until(nothing, "everything of the job gone")
    await replica.settle()
    assert await nothing(), "and nothing comes back"


async def test_a_hundred_pods_are_made_once_each(jobs: Jobs, start) -> None:
    replica = await start()
    await jobs.create(rollout={"replicas": 60}, env={"replicas": 40})

    async def whole() -> bool:
        return len(await jobs.pods()) == 101

    await until(whole, "101 pods")
    await replica.settle()
    assert replica.writes()["POST", "pods", "201"] == 101
    assert ("POST", "pods", "409") not in replica.writes()
