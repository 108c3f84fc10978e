"""Service, ConfigMap, claims, gangs and their hashes."""

import json
import re

import pytest

from rl_core.api import defaults, document
from rl_core.api.job import RLJob
from rl_core.plan.colocated import colocate
from rljob_operator import manifests
from rljob_operator.manifests import gang, meta
from rljob_operator.model import OperatorConfig
from tests.unit.operator.manifest_samples import CONFIG, UID, full_job, make_job, make_plan, make_pods
from tests.unit.operator.network_policies import selects


def support(job, config=CONFIG):
    return {(o["kind"], o["metadata"]["name"]): o for o in manifests.support.build(job, config=config)}


def hash_of(obj):
    return obj["metadata"]["annotations"]["rljob.dev/manifest-hash"]


def test_each_object_is_owned_labelled_and_hashed():
    for obj in support(full_job()).values():
        labels = obj["metadata"]["labels"]
        assert labels["rljob.dev/job"] == "sums" and labels["rljob.dev/job-uid"] == UID
        assert obj["metadata"]["ownerReferences"][0]["uid"] == UID and obj["metadata"]["namespace"] == "default"
        assert hash_of(obj)


def test_objects_and_hashes_are_a_function_of_the_job_and_an_operator_upgrade_writes_nothing():
    first, again = support(full_job()), support(full_job())
    upgraded = support(full_job(), OperatorConfig(images=CONFIG.images, version="2.0.0+dirty"))
    assert first == again
    assert {key: hash_of(obj) for key, obj in first.items()} == {key: hash_of(obj) for key, obj in upgraded.items()}
    assert {obj["metadata"]["labels"]["app.kubernetes.io/version"] for obj in upgraded.values()} == {"2.0.0_dirty"}


def test_the_hash_tells_every_difference_of_content():
    before, after = support(make_job()), support(make_job(algorithm={"steps": 7}))
    assert [key for key in before if hash_of(before[key]) != hash_of(after[key])] == [("ConfigMap", "sums-config")]


def test_the_config_map_is_the_job_with_all_its_defaults_and_its_identity():
    for job in (make_job(labels={"a": "b"}), full_job()):
        text = support(job)["ConfigMap", "sums-config"]["data"]["job.json"]
        read = document.read(RLJob, text)
        assert read.spec == job.spec
        assert (read.metadata.name, read.metadata.namespace, read.metadata.uid) == ("sums", "default", UID)
        assert json.loads(text)["spec"]["rollout"]["sampling"]["temperature"] == 1.0


def test_the_config_map_keeps_the_defaults_and_its_hash_is_of_what_the_author_wrote_alone():
    """So a version with another default, or a field more, finds it as it should be."""
    table = json.loads(defaults.present().text) | {"LossSpec": {"klCoefficient": 0.5}}
    kept, written = defaults.read(json.dumps(table)), make_job(algorithm={"steps": 7})
    plain = written.model_dump(mode="json", by_alias=True, exclude_unset=True)
    job = RLJob.model_validate(plain, context=kept.context)
    found = manifests.config.build(job, defaults=kept, config=CONFIG)
    assert defaults.read(found["data"]["defaults.json"]) == kept
    assert json.loads(found["data"]["job.json"])["spec"]["algorithm"]["loss"]["klCoefficient"] == 0.5
    assert hash_of(found) == meta.digest({"uid": UID, "schema": kept.version, "spec": plain["spec"]})


def test_pods_have_names_before_they_are_ready():
    spec = support(make_job())["Service", "sums"]["spec"]
    assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
    assert spec["selector"] == {"rljob.dev/job": "sums", "rljob.dev/job-uid": UID}


def test_claim_templates_are_made_for_roles_with_accelerators_by_dra_only():
    dra = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
    found = support(make_job(actor={"gpus": 2} | dra, rollout={"gpus": 1}, env=dra))
    (key,) = (key for key in found if key[0] == "ResourceClaimTemplate")
    assert re.fullmatch("sums-actor-gpus-[0-9a-f]{8}", key[1])
    (request,) = found[key]["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 2}


@pytest.mark.parametrize("change", [{"gpus": 4}, {"deviceClass": "other.example.com"}], ids=str)
def test_a_claim_template_of_another_content_is_another_object_that_pods_name(change):
    actor = {"gpus": 2, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
    names = []
    for fields in (actor, actor | change):
        job = make_job(actor=fields)
        (template,) = manifests.claims.templates(job, config=CONFIG)
        pod = next(pod for pod in make_plan(job).pods if pod.role == "actor")
        (claim,) = manifests.pods.build(job, pod, config=CONFIG)["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
        names.append(template["metadata"]["name"])
    assert names[0] != names[1]


# --- accelerators shared by actor and rollout --------------------------------------------------------------------------------


def colocated_pods(shape, allocation):
    dra = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"} if allocation == "dra" else {}
    role = {"gpus": 1, "replicas": 2} | dra
    job = make_job(actor=role, rollout=role)
    plan = colocate(make_plan(job), shape=shape)
    return {pod.name: manifests.pods.build(job, pod, config=CONFIG) for pod in plan.pods if pod.role != "env"}


def test_two_containers_of_a_colocated_pod_share_one_claim():
    pods = colocated_pods("containers", "dra")
    assert sorted(pods) == ["sums-actor-0", "sums-actor-1"]
    for pod in pods.values():
        actor, rollout = pod["spec"]["containers"]
        assert (actor["name"], rollout["name"]) == ("actor", "rollout")
        assert actor["resources"] == rollout["resources"] == {"claims": [{"name": "gpus"}]}
        (claim,) = pod["spec"]["resourceClaims"]
        assert claim["name"] == "gpus" and claim["resourceClaimTemplateName"].startswith("sums-actor-gpus-")
        ports = [port["containerPort"] for container in (actor, rollout) for port in container["ports"]]
        assert len(ports) == len(set(ports))


def test_with_the_device_plugin_one_container_runs_both_processes():
    pods = colocated_pods("processes", "devicePlugin")
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "1"}
        (keys,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "rljob-keys")
        paths = {item["path"] for item in keys["projected"]["sources"][0]["secret"]["items"]}
        assert {"actor.secret", "rollout.secret"} <= paths


def test_the_device_plugin_cannot_share_and_says_so():
    with pytest.raises(ValueError, match="must share its accelerators by gpuAllocation dra"):
        colocated_pods("containers", "devicePlugin")


# --- gangs -------------------------------------------------------------------------------------------------------------------

GANG_JOB = {"actor": {"replicas": 3}, "algorithm": {"promptsPerStep": 33}, "rollout": {"replicas": 4, "minReplicas": 2}}


def gang_of(api, **spec):
    return gang.manifests(make_job(**(GANG_JOB | spec)), config=OperatorConfig(gang_api=api))


@pytest.mark.parametrize("api", [None, *gang.PREFERENCE])
def test_no_gang_where_none_is_served_wanted_or_needed(api):
    assert gang_of(None) == gang.Gang()
    assert gang_of(api, scheduling={"gang": "none"}) == gang.Gang()
    alone = gang.manifests(make_job(), config=OperatorConfig(gang_api=api))
    assert alone == gang.Gang()


def test_the_built_in_api_gathers_the_actor_and_a_gang_of_another_size_or_job_is_another_object():
    found = gang_of(gang.BUILT_IN)
    (group,) = found.objects
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}} and group["kind"] == "PodGroup"
    name = group["metadata"]["name"]
    assert found.pod_fields == {"actor": {"spec": {"schedulingGroup": {"podGroupName": name}}}}
    others = gang_of(gang.BUILT_IN, actor={"replicas": 11}), gang_of(gang.BUILT_IN, uid="of-another-job")
    assert len({name, *(other.objects[0]["metadata"]["name"] for other in others)}) == 3
    assert gang_of(gang.BUILT_IN) == found


def test_a_gang_has_the_priority_of_its_pods_where_gangs_have_one():
    high = {"actor": GANG_JOB["actor"] | {"priorityClassName": "high"}}
    built_in, volcano, coscheduling = (
        {o["metadata"]["name"]: o["spec"].get("priorityClassName") for o in gang_of(api, **high).objects}
        for api in gang.PREFERENCE
    )
    assert [*built_in.values()] == ["high"]
    assert volcano == {"sums-actor-gang": "high", "sums-rollout-gang": None}
    assert coscheduling == {"sums-actor-gang": None, "sums-rollout-gang": None}
    (plain,) = gang_of(gang.BUILT_IN).objects
    assert plain["metadata"]["name"] not in built_in, "the spec of a group cannot change"


def test_a_gangs_name_fits_where_a_pods_name_does():
    (group,) = gang_of(gang.BUILT_IN, name="j" * 40, actor={"replicas": 11}).objects
    assert len(group["metadata"]["name"]) <= 63


@pytest.mark.parametrize("api", [gang.VOLCANO, gang.COSCHEDULING])
def test_other_schedulers_gather_rollouts_too(api):
    found = gang_of(api)
    assert {o["metadata"]["name"]: o["spec"] for o in found.objects} == {
        "sums-actor-gang": {"minMember": 3},
        "sums-rollout-gang": {"minMember": 2},
    }
    job, config = make_job(**GANG_JOB), OperatorConfig(images=CONFIG.images, gang_api=api)
    pods = {pod.name: manifests.pods.build(job, pod, config=config) for pod in make_plan(job).pods}
    marks = {name: pod["metadata"]["labels"] | pod["metadata"]["annotations"] for name, pod in pods.items()}
    named = {name: [v for k, v in found.items() if k.startswith("scheduling.")] for name, found in marks.items()}
    assert named["sums-actor-2"] == ["sums-actor-gang"] and named["sums-rollout-3"] == ["sums-rollout-gang"]
    assert named["sums-env-0"] == []


# --- schema objects to API objects ---------------------------------------------------------------------------------------------


def test_what_was_not_given_is_left_out_and_an_empty_map_that_was_given_stays():
    spec = make_job(env={"volumes": [{"name": "a", "emptyDir": {}}]}).spec.env
    assert meta.api(spec.volumes[0]) == {"name": "a", "emptyDir": {"medium": ""}}
    assert meta.api(spec.resources) == {}


def test_canonical_json_is_one_text_per_value():
    assert meta.canonical({"b": [1, "\u00e9"], "a": {}}) == '{"a":{},"b":[1,"\u00e9"]}'
    assert meta.digest({"a": 1, "b": 2}) == meta.digest({"b": 2, "a": 1}) != meta.digest({"a": 1, "b": "2"})


def test_volcano_is_told_the_queue_and_what_the_group_asks_for():
    resources = {"requests": {"cpu": "1500m", "memory": "2Gi"}, "limits": {"memory": "3Gi", "ephemeral-storage": "1G"}}
    found = gang_of(
        gang.VOLCANO,
        actor={"replicas": 3, "gpus": 2, "processesPerPod": 1, "resources": resources},
        scheduling={"queue": "gold"},
    )
    spec = next(one["spec"] for one in found.objects if "-actor-" in one["metadata"]["name"])
    assert spec["queue"] == "gold" and spec["minMember"] == 3
    assert spec["minResources"] == {
        "cpu": "4500m",
        "memory": "6Gi",
        "ephemeral-storage": "3G",
        "nvidia.com/gpu": "6",
    }
    others = (one for api in (gang.BUILT_IN, gang.COSCHEDULING) for one in gang_of(api).objects)
    assert not any({"queue", "minResources"} & one["spec"].keys() for one in others)


@pytest.mark.parametrize(
    ("scheduling", "api", "words"),
    [
        ({"gang": "required"}, None, "gang required needs one of the APIs scheduling.k8s.io/v1alpha2"),
        ({"queue": "gold"}, gang.BUILT_IN, "scheduling.queue gold needs the API scheduling.volcano.sh/v1beta1"),
        ({"queue": "gold"}, None, "got none"),
        ({"gang": "required"}, gang.BUILT_IN, ""),
        ({"queue": "gold"}, gang.VOLCANO, ""),
        ({}, None, ""),
    ],
)
def test_a_demand_that_the_cluster_cannot_meet_is_told(scheduling, api, words):
    told = gang.unavailable(make_job(scheduling=scheduling), api)
    assert words in told and bool(told) is bool(words)


@pytest.mark.parametrize(("scheduling", "kept"), [({}, 3), ({"evictions": "allow"}, 0)], ids=["avoided", "allowed"])
def test_actor_pods_are_not_evicted_unless_the_job_allows_it(scheduling, kept):
    job = make_job(actor={"replicas": 3}, algorithm={"promptsPerStep": 33}, scheduling=scheduling)
    budget = support(job)["PodDisruptionBudget", "sums-actor"]
    pods = make_pods(job)
    chosen = [name for name, pod in pods.items() if selects(budget["spec"]["selector"], pod["metadata"]["labels"])]
    assert chosen == [f"sums-actor-{index}" for index in range(3)] and budget["spec"]["minAvailable"] == kept
    marked = [name for name, pod in pods.items() if "karpenter.sh/do-not-disrupt" in pod["metadata"]["annotations"]]
    assert marked == (chosen if kept else [])


def test_a_users_word_about_disruption_wins():
    safe = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    pods = make_pods(make_job(actor={"annotations": {safe: "true"}}))
    assert pods["sums-actor-0"]["metadata"]["annotations"][safe] == "true"
