"""A job with a group besides actor, rollout and env: manifests and decisions follow from its description alone."""

from dataclasses import replace

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.roles import RoleSpec
from rl_core.plan.groups import ENV, ROLLOUT, Group, Lifecycle, groups_of
from rl_core.plan.launch import Ports, build_launch_plan
from rljob_operator import manifests, naming
from rljob_operator.cli import jobs
from rljob_operator.manifests.containers import image_of
from rljob_operator.model import Observed
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.runtime.controller import claim_names
from tests.unit.operator.manifest_samples import CONFIG, MASTER, make_job
from tests.unit.operator.network_policies import Endpoint, allows
from tests.unit.operator.simulator import CONFIG as IMAGES
from tests.unit.operator.simulator import START, World
from tests.unit.operator.simulator import make_job as simulated_job

JUDGE = "judge"
SPEC = RoleSpec.model_validate(
    {
        "image": "registry.test/judge:1",
        "gpus": 2,
        "gpuAllocation": "dra",
        "deviceClass": "gpu.example.com",
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "judges"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
)


def groups(spec, **traits):
    """Return the groups of a job and two pods of judges, which rollouts may call."""
    judge = {"name": JUDGE, "worker": "judges:Judge", "spec": SPEC, "replicas": 2, "callers": frozenset({ROLLOUT})}
    return groups_of(spec) | {JUDGE: Group(**(judge | traits))}


def support(job, **traits):
    objects = manifests.support.build(job, config=CONFIG, groups=groups(job.spec, **traits))
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


def endpoint(job, group, index=0):
    labels = {
        **naming.job_labels("sums", job.metadata.uid),
        naming.LABEL_ROLE: group,
        naming.LABEL_INDEX: str(index),
    }
    return Endpoint(namespace="default", labels=labels)


def test_a_pod_of_the_group_has_its_image_claim_keys_and_volumes():
    job = make_job()
    plan = build_launch_plan(job, name="sums", namespace="default", uid=job.metadata.uid, groups=groups(job.spec))
    planned = {pod.name: pod for pod in plan.pods}
    pod = manifests.pods.build(job, planned["sums-judge-1"], config=CONFIG, groups=groups(job.spec))
    (container,) = pod["spec"]["containers"]
    assert container["name"] == JUDGE and container["image"] == "registry.test/judge:1"
    assert pod["metadata"]["labels"][naming.LABEL_ROLE] == JUDGE
    (claim,) = pod["spec"]["resourceClaims"]
    assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in support(job)
    keys, *_ = [v["projected"]["sources"][0]["secret"]["items"] for v in pod["spec"]["volumes"] if "projected" in v]
    files = {item["key"] for item in keys}
    assert {file for file in files if file.endswith(".secret")} == {"judge.secret"} and "judge.public" in files
    secret = manifests.secret.build(job, master=MASTER, groups=groups(job.spec))
    assert files <= set(secret["data"])


def test_a_group_that_names_no_image_has_that_of_the_actor():
    declared = groups(make_job().spec)
    plain = replace(declared[JUDGE], spec=RoleSpec.model_validate({}))
    assert image_of(plain, config=CONFIG) == CONFIG.images["actor"] != CONFIG.images[ROLLOUT]
    assert image_of(declared[ROLLOUT], config=CONFIG) == CONFIG.images[ROLLOUT]


def test_policies_follow_the_callers_of_the_group():
    job, ports = make_job(), Ports()
    policies = [o for (kind, _), o in support(job).items() if kind == "NetworkPolicy"]
    judge, rollout, env = (endpoint(job, group) for group in (JUDGE, ROLLOUT, ENV))
    runner = endpoint(job, "actor")
    assert allows(policies, rollout, judge, ports.rpc) and allows(policies, runner, judge, ports.rpc)
    assert not allows(policies, env, judge, ports.rpc) and not allows(policies, rollout, judge, ports.rpc + 1)
    assert allows(policies, judge, runner, ports.hub) and allows(policies, judge, runner, ports.channel)
    for target, port in ((runner, ports.control), (rollout, ports.rpc), (env, ports.rpc), (endpoint(job, JUDGE, 1), 1)):
        assert not allows(policies, judge, target, port)
    policies = [o for (kind, _), o in support(job, callers=frozenset({ENV})).items() if kind == "NetworkPolicy"]
    assert allows(policies, env, judge, ports.rpc) and not allows(policies, rollout, judge, ports.rpc)


def test_a_gang_has_a_budget_and_is_scheduled_together():
    job = make_job()
    found = support(job, lifecycle=Lifecycle.GANG)
    assert found["PodDisruptionBudget", "sums-judge"]["spec"]["minAvailable"] == 2
    assert ("PodDisruptionBudget", "sums-judge") not in support(job)
    config = type(CONFIG)(gang_api=manifests.gang.VOLCANO)
    for lifecycle, expected in ((Lifecycle.GANG, [JUDGE]), (Lifecycle.ELASTIC, [])):
        described = groups(job.spec, lifecycle=lifecycle)
        assert list(manifests.gang.manifests(job, config=config, groups=described).pod_fields) == expected


def look(job, now, *, pods=(), status=None):
    claims = {"judges": {"spec": {"accessModes": ["ReadWriteMany"]}}}
    observed = pod_views.observe(pods=pods, claims=claims)
    return reconcile({**job, "status": status or {}}, observed, now, config=IMAGES, groups=groups)


def test_a_reconcile_creates_its_pods_reports_them_and_replaces_one_alone():
    world = World(simulated_job())
    first = look(world.job, START)
    names = [pod["metadata"]["name"] for pod in first.create]
    assert names[-2:] == ["x-judge-0", "x-judge-1"]
    (role,) = [role for role in first.status["roles"] if role["name"] == JUDGE]
    assert role["desired"] == 2 and role["ready"] == 0
    pods = [_bound(pod) for pod in first.create]
    ended = next(pod for pod in pods if pod["metadata"]["name"] == "x-judge-1")
    state = {"terminated": {"exitCode": 1, "reason": "Error"}}
    ended["status"] |= {"phase": "Failed", "containerStatuses": [{"name": JUDGE, "state": state}]}
    plan = look(world.job, START + 5, pods=pods, status=first.status)
    assert [deletion.name for deletion in plan.delete] == ["x-judge-1"]
    assert plan.status["epoch"] == 1 and plan.status["restarts"] == 0
    (role,) = [role for role in plan.status["roles"] if role["name"] == JUDGE]
    assert (role["failed"], role["restarts"]) == (1, 1)


def test_a_claim_of_its_volumes_must_exist():
    plan = reconcile(World(simulated_job()).job, Observed(), START, config=IMAGES, groups=groups)
    (accepted,) = [c for c in plan.status["conditions"] if c["type"] == "Accepted"]
    assert accepted["reason"] == "VolumeClaimNotFound" and "judge.volumes" in accepted["message"] and not plan.create


def _bound(pod):
    """Return a pod as a cluster has it: with a uid, bound to a node."""
    meta = {**pod["metadata"], "uid": pod["metadata"]["name"], "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**pod, "metadata": meta, "spec": {**pod["spec"], "nodeName": "n"}, "status": {"phase": "Running"}}


def test_a_group_that_the_job_declares_has_pods_keys_status_and_claims():
    block = {
        "name": JUDGE, "worker": "judges:Judge", "replicas": 2, "callers": ["rollout"], "image": "registry.test/judge:1",
        "config": {"threshold": 0.5}, "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "judges"}}],
    }  # fmt: skip
    world = World(simulated_job(groups=[block], program="judges:Program"))
    claims = {"judges": {"spec": {"accessModes": ["ReadWriteMany"]}}}
    plan = reconcile(world.job, pod_views.observe(pods=(), claims=claims), START, config=IMAGES)
    pods = {pod["metadata"]["name"]: pod for pod in plan.create}
    assert {"x-judge-0", "x-judge-1"} < set(pods) and claim_names(world.job) == ["judges"]
    assert [role["name"] for role in plan.status["roles"]] == ["actor", "rollout", "env", JUDGE]
    (container,) = pods["x-judge-0"]["spec"]["containers"]
    assert container["image"] == "registry.test/judge:1"
    keys = manifests.secret.build(world.job, master=MASTER)["data"]
    assert {"judge.secret", "judge.public", "actor.secret"} < set(keys)
    mounted = next(v["projected"]["sources"] for v in pods["x-judge-0"]["spec"]["volumes"] if "projected" in v)
    assert {item["key"] for source in mounted for item in source["secret"]["items"]} <= set(keys)


class Stored:
    """Stands in for the connection to a cluster with one job."""

    namespace = "default"

    def __init__(self, job):
        self.job, self.patches = job, []

    def read(self, kind, name):
        return self.job

    def patch(self, kind, name, change, **subresource):
        self.patches.append((change, subresource))


def test_a_group_that_the_job_declares_is_scaled_in_the_version_of_the_list_that_was_read():
    gang = {"name": "reader", "worker": "own:Reader", "lifecycle": "gang"}
    job = World(simulated_job(groups=[{"name": JUDGE, "worker": "judges:Judge"}, gang])).job
    job["metadata"]["resourceVersion"] = "7"
    stored = Stored(job)
    jobs.scale(stored, "x", {JUDGE: 3, "env": 2})
    (groups_change, _), (env_change, _) = stored.patches
    assert groups_change["metadata"] == {"resourceVersion": "7"} and env_change == {"spec": {"env": {"replicas": 2}}}
    assert [(group["name"], group.get("replicas")) for group in groups_change["spec"]["groups"]] == [
        (JUDGE, 3),
        ("reader", None),
    ]
    for name in ("reader", "actor", "sampler"):
        with pytest.raises(ConfigError, match=rf"elastic groups of the job \(.*judge.*\), got {name}"):
            jobs.scale(stored, "x", {name: 3})
    assert len(stored.patches) == 2


def test_bad_pod_fields_of_a_declared_group_are_refused_by_the_operator():
    block = {"name": JUDGE, "worker": "judges:Judge", "hostNetwork": True}
    plan = reconcile(World(simulated_job(groups=[block])).job, Observed(), START, config=IMAGES)
    (accepted,) = [c for c in plan.status["conditions"] if c["type"] == "Accepted"]
    assert (
        accepted["reason"] == "InvalidSpec" and "spec.groups.0.hostNetwork" in accepted["message"] and not plan.create
    )
