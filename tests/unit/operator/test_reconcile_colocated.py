"""A colocated job: rollouts are guests of the actor's pods, and everything that counts, restarts or fences pods knows it."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.plan.groups import groups_of
from rljob_operator import naming
from rljob_operator.manifests import claims, containers, gang, meta, network
from rljob_operator.model import OperatorConfig
from tests.unit.operator.manifest_samples import CONFIG as IMAGES
from tests.unit.operator.manifest_samples import make_job as typed_job
from tests.unit.operator.network_policies import Endpoint, allows
from tests.unit.operator.simulator import World, make_job, reason, running

PAIRS: dict[str, Any] = {
    "placement": {"mode": "colocated"},
    "actor": {"replicas": 2},
    "rollout": {"replicas": 2, "minReplicas": 2},
}
PLUGIN: dict[str, Any] = {**PAIRS, "actor": {"replicas": 2, "gpus": 1}, "rollout": {**PAIRS["rollout"], "gpus": 1}}
DRA = {"gpus": 1, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}


def test_there_are_no_pods_but_the_actors_and_the_envs_and_the_rollouts_in_them_are_counted() -> None:
    world = World(make_job(**PAIRS))
    assert [pod["metadata"]["name"] for pod in world.reconcile().create] == ["x-actor-0", "x-actor-1", "x-env-0"]
    world = running(**PAIRS)
    assert sorted(world.pods) == ["x-actor-0", "x-actor-1", "x-env-0"] and world.phase == "Running"
    rollouts = world.role("rollout")
    assert (rollouts["desired"], rollouts["ready"], rollouts["active"]) == (2, 2, 2)
    assert world.status["rollout"]["replicas"] == 2 and reason(world, "Degraded") == "AllRolesReady"
    world.end_pod("x-env-0", 3)
    world.reconcile()
    assert reason(world, "Degraded") != "BelowMinimum", "the rollouts are all there"


def test_a_hybrid_job_has_pods_for_the_rollouts_that_no_actor_pod_hosts_and_scales_only_these() -> None:
    more = PAIRS | {"placement": {"mode": "hybrid"}, "rollout": {"replicas": 4, "minReplicas": 3}}
    world = running(**more)
    assert sorted(world.pods) == ["x-actor-0", "x-actor-1", "x-env-0", "x-rollout-2", "x-rollout-3"]
    rollouts = world.role("rollout")
    assert (rollouts["desired"], rollouts["ready"], rollouts["active"]) == (4, 4, 4)
    assert world.status["rollout"]["replicas"] == 4 and reason(world, "Degraded") == "AllRolesReady"
    world.end_pod("x-rollout-2", 137)
    world.run_until(lambda: world.role("rollout")["ready"] == 3)
    world.run_until(lambda: world.role("rollout")["ready"] == 4)
    assert world.status["epoch"] == 1 and world.role("rollout")["restarts"] == 1
    world.edit(rollout={"replicas": 2, "minReplicas": 2})
    world.run_until(lambda: not {"x-rollout-2", "x-rollout-3"} & set(world.pods))
    assert world.phase == "Running" and world.role("rollout")["desired"] == 2


def test_what_restarts_the_rollouts_restarts_the_job() -> None:
    world = running(**PAIRS)
    world.stall = {"reason": "WaitingForRollout", "message": "m", "since": 400.0, "waits": []}
    world.run_until(lambda: world.status["epoch"] == 2)
    assert world.condition("Failed")["reason"] == "Stalled"
    world.stall = None
    world.run_until(lambda: world.phase == "Running")
    world.end_pod("x-actor-1", 137)
    world.run_until(lambda: world.status["epoch"] == 3 and world.phase == "Running")
    assert sorted(world.pods) == ["x-actor-0", "x-actor-1", "x-env-0"]


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"nodeSelector": {"zone": "a"}}, "rollout.nodeSelector must be that of actor with placement.mode colocated"),
        ({"image": "r:2"}, "rollout.image must be that of actor"),
        ({"gpuResource": "amd.com/gpu"}, "rollout.gpuResource must be that of actor"),
    ],
    ids=["pod", "image", "devices"],
)
def test_what_a_guest_cannot_choose_is_refused_by_name(rollout: dict[str, Any], words: str) -> None:
    world = World(make_job(**PLUGIN | {"rollout": PLUGIN["rollout"] | rollout}))
    assert not world.reconcile().create
    assert reason(world, "Accepted") == "InvalidSpec" and words in world.condition("Accepted")["message"]


def test_with_claims_the_guest_has_a_container_of_its_own_and_the_same_class() -> None:
    other = DRA | {"deviceClass": "other.example.com"}
    world = World(make_job(**PAIRS | {"actor": PAIRS["actor"] | DRA, "rollout": PAIRS["rollout"] | other}))
    assert not world.reconcile().create and "rollout.deviceClass" in world.condition("Accepted")["message"]
    own = {"image": "r:2", "resources": {"limits": {"memory": "1Gi"}}}
    world = World(make_job(**PAIRS | {"actor": PAIRS["actor"] | DRA, "rollout": PAIRS["rollout"] | DRA | own}))
    pod = world.reconcile().create[0]
    actor, rollout = pod["spec"]["containers"]
    assert (actor["image"], rollout["image"]) == ("a:1", "r:2") and len(pod["spec"]["resourceClaims"]) == 1
    assert rollout["resources"] == {"limits": {"memory": "1Gi"}, "claims": actor["resources"]["claims"]}


def test_volumes_of_one_name_merge_only_if_they_are_equal() -> None:
    claim = {"name": "out", "persistentVolumeClaim": {"claimName": "out"}}

    def with_volume(volume: dict[str, Any]) -> World:
        roles = {role: PAIRS[role] | {"volumes": [given]} for role, given in (("actor", claim), ("rollout", volume))}
        world = World(make_job(**PAIRS | roles))
        world.claims["out"] = {"spec": {"accessModes": ["ReadWriteMany"]}}
        world.reconcile()
        return world

    refused = with_volume({"name": "out", "emptyDir": {}})
    assert reason(refused, "Accepted") == "InvalidSpec" and not refused.pods
    assert (
        'rollout.volumes must define out as actor.volumes does with placement.mode colocated, as they share a pod, got {"emptyDir": {}} '
        'beside {"persistentVolumeClaim": {"claimName": "out"}}; rename one of them with its mounts, or write both alike'
    ) in refused.condition("Accepted")["message"]
    assert reason(with_volume(claim), "Accepted") == "SpecAccepted"
    assert reason(with_volume({"name": "scratch", "emptyDir": {}}), "Accepted") == "SpecAccepted"


def with_containers(job):
    """Return the names of the groups that have containers of their own."""
    return tuple(group.name for group in containers.groups_with_containers(job, groups_of(job.spec)))


def test_the_rollouts_image_is_asked_for_only_where_it_has_a_container() -> None:
    for one, asked in ((PLUGIN, False), (PAIRS, True), (PAIRS | {"actor": DRA, "rollout": DRA}, True)):
        rollout, actor = one["rollout"] | {"replicas": 1, "minReplicas": 1}, one["actor"] | {"replicas": 1}
        job = typed_job(placement=PAIRS["placement"], actor=actor, rollout=rollout)
        assert with_containers(job) == (("actor", "rollout", "env") if asked else ("actor", "env"))
    assert with_containers(typed_job()) == ("actor", "rollout", "env")


def test_support_objects_are_for_the_pods_that_there_are() -> None:
    job = typed_job(
        placement=PAIRS["placement"], actor=DRA | {"replicas": 2}, rollout=DRA | {"replicas": 2, "minReplicas": 2}
    )
    assert [t["metadata"]["labels"][naming.LABEL_COMPONENT] for t in claims.templates(job, config=IMAGES)] == ["actor"]
    config = OperatorConfig(images=IMAGES.images, gang_api=gang.VOLCANO)
    assert list(gang.manifests(job, config=config).pod_fields) == ["actor"]
    policies = network.build(job, config=IMAGES)
    name, _, uid = meta.identity(job)

    def pod(role: str, index: int) -> Endpoint:
        labels = {**naming.job_labels(name, uid), naming.LABEL_ROLE: role, naming.LABEL_INDEX: str(index)}
        return Endpoint(
            namespace="default", labels=labels, namespace_labels={naming.LABEL_NAMESPACE: "default"}, ip="10.0.0.9"
        )

    assert allows(policies, pod("actor", 1), pod("env", 0), 7705), (
        "the rollout in any pod of the actor calls environments"
    )
    agents = typed_job(
        placement=PAIRS["placement"],
        actor=DRA | {"replicas": 2},
        rollout=DRA | {"replicas": 2, "minReplicas": 2},
        env={"type": "agent", "agent": "program:run"},
    )
    policies = network.build(agents, config=IMAGES)
    assert allows(policies, pod("env", 0), pod("actor", 1), 7706), "programs call the rollout in any pod of the actor"
    assert not allows(policies, pod("env", 0), pod("actor", 1), 7705)
