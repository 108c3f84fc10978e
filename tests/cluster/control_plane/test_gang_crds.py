"""Gangs where the built-in API is not served: none, or by the objects of Volcano and of coscheduling.

Their schedulers do not run here. The definitions are ours, with the group, version and field types of theirs that the operator
writes: what is held is that the operator finds the API, writes what it takes with the chart's rights, all of which it uses, and marks
the pods.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rljob_operator import kinds, naming
from rljob_operator.manifests import gang
from tests.cluster.operator_rig.jobs import Jobs, manifest
from tests.cluster.operator_rig.replica import home_of
from tests.cluster.operator_rig.witness import Witness, granted
from tests.cluster.testcluster.access import Access

SECTIONS = {"actor": {"replicas": 2}, "rollout": {"replicas": 3, "minReplicas": 2}}
PODS = ("job-actor-0", "job-actor-1", "job-rollout-0", "job-rollout-1", "job-rollout-2", "job-env-0")
GANGS = {"job-actor-gang": 2, "job-rollout-gang": 2}
MARKS = {
    gang.VOLCANO: lambda pod: pod["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
    gang.COSCHEDULING: lambda pod: pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
}
"""Where a pod names its gang, as the documentation of either scheduler has it."""


def definition(kind: kinds.Kind) -> dict[str, Any]:
    """Return a CustomResourceDefinition of gang objects; fields that it lacks are dropped by the API server."""
    fields: dict[str, Any] = {"minMember": {"type": "integer", "format": "int32"}}
    if kind.api_version == gang.VOLCANO:
        quantity = {"x-kubernetes-int-or-string": True, "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE])?$"}
        fields |= {"queue": {"type": "string"}, "priorityClassName": {"type": "string"}}
        fields["minResources"] = {"type": "object", "additionalProperties": quantity}
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": fields}}}
    version = {"name": kind.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind.kind, "plural": kind.plural}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {"group": kind.group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


@pytest.fixture(params=MARKS)
def group(request: pytest.FixtureRequest, control_plane: Access) -> Iterator[kinds.Kind]:
    """The kind of gang objects of one scheduler, served until the test has ended."""
    kind = kinds.of(request.param, gang.KIND)
    plane, path = control_plane.cluster.control_plane, f"/apis/{kind.api_version}/{kind.plural}"
    control_plane.apply(definition(kind))
    control_plane.wait_served(kind.group, kind.version, kind.plural)
    yield kind
    control_plane.kubectl("delete", "crd", f"{kind.plural}.{kind.group}")
    plane.api_server.wait(f"resource {path} gone", lambda: not plane.api.exists(path))


async def test_a_scheduler_of_gangs_gets_its_objects_under_the_charts_rights_which_are_all_used(
    control_plane: Access, jobs: Jobs, start: Callable, rights: list[dict], group: kinds.Kind
) -> None:
    witness = Witness()
    account = control_plane.kubeconfig_of("rljob-operator", namespace=home_of(jobs.namespace))
    replica = await start(kubeconfig=account, wrap=witness.wrap)
    job = await jobs.create(**SECTIONS)
    pods = await jobs.wait_pods(*PODS)
    groups = await jobs.list(group)
    assert {one["metadata"]["name"]: one["spec"]["minMember"] for one in groups} == GANGS
    assert {owner["uid"] for one in groups for owner in one["metadata"]["ownerReferences"]} == {job["metadata"]["uid"]}
    mark = MARKS[group.api_version]
    assert {name: mark(pod) for name, pod in pods.items()} == {
        name: None if "-env-" in name else f"{name.rpartition('-')[0]}-gang" for name in PODS
    }
    await replica.wait_watched(group.plural)
    await replica.settle()
    assert witness.refused == []
    used = {right for right in witness.used | {("watch", group.group, group.plural)} if right[1] == group.group}
    assert used == {right for right in granted(rights) if right[1] == group.group}


async def test_a_gang_of_someone_else_under_our_name_is_left_alone_and_told(
    jobs: Jobs, start: Callable, group: kinds.Kind
) -> None:
    name, theirs = "job-actor-gang", {"minMember": 7}
    body = {"apiVersion": group.api_version, "kind": group.kind, "metadata": {"name": name}, "spec": theirs}
    made = await jobs.api.create(group, jobs.namespace, body)
    await start()
    await jobs.create(**SECTIONS)
    assert f"PodGroup/{name}" in await jobs.wait_condition("Accepted", "False", "NameConflict")
    assert await jobs.pods() == {}, "they would join that gang"
    kept = await jobs.api.read(group, jobs.namespace, name)
    assert kept["metadata"]["uid"] == made["metadata"]["uid"] and kept["spec"] == theirs
    await jobs.api.delete(group, jobs.namespace, name, uid=made["metadata"]["uid"])
    await jobs.wait_condition("Accepted", "True")
    await jobs.wait_pods(*PODS)
    assert (await jobs.api.read(group, jobs.namespace, name))["spec"]["minMember"] == GANGS[name]


@pytest.mark.parametrize("group", [gang.VOLCANO], indirect=True)
async def test_volcano_gets_the_queue_and_what_the_gang_asks_for(
    jobs: Jobs, start: Callable, group: kinds.Kind
) -> None:
    await start()
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}}
    await jobs.create(actor={"replicas": 2, "resources": resources}, scheduling={"queue": "gold"})
    await jobs.wait_pods("job-actor-0", "job-actor-1", "job-rollout-0", "job-rollout-1", "job-env-0")
    (actor,) = [one["spec"] for one in await jobs.list(group) if one["metadata"]["name"] == "job-actor-gang"]
    assert actor == {"minMember": 2, "queue": "gold", "minResources": {"cpu": "1000m", "memory": "2Gi"}}


async def test_a_gang_that_nothing_can_give_is_told_and_no_pod_is_made(jobs: Jobs, start: Callable) -> None:
    await start()
    await jobs.create(**SECTIONS, scheduling={"gang": "required"})
    await jobs.wait_condition("Accepted", "False", "GangUnavailable")
    assert await jobs.pods() == {}
    await jobs.change({"scheduling": {"gang": "auto"}})
    await jobs.wait_pods(*PODS)


async def test_the_pods_of_a_job_with_a_queue_of_kueue_are_marked_for_it(jobs: Jobs, start: Callable) -> None:
    await start()
    job = manifest("job", **SECTIONS)
    job["metadata"]["labels"] = {naming.LABEL_QUEUE: "gold"}
    await jobs.api.create(kinds.RLJOB, jobs.namespace, job)
    pods = await jobs.wait_pods(*PODS)
    assert {pod["metadata"]["labels"][naming.LABEL_QUEUE] for pod in pods.values()} == {"gold"}
    grouped = {name: pod["metadata"]["labels"].get(gang.KUEUE_GROUP) for name, pod in pods.items()}
    assert grouped["job-actor-0"] == grouped["job-actor-1"] is not None and list(grouped.values()).count(None) == 4
    assert pods["job-actor-0"]["metadata"]["annotations"][gang.KUEUE_COUNT] == "2"


async def test_without_an_api_for_gangs_pods_are_in_none(jobs: Jobs, start: Callable) -> None:
    replica = await start()
    await jobs.create(**SECTIONS)
    pods = await jobs.wait_pods(*PODS)
    assert [name for name, pod in pods.items() if "schedulingGroup" in pod["spec"]] == []
    assert [name for name, pod in pods.items() for mark in MARKS.values() if mark(pod)] == []
    await replica.settle()
    assert [key for key in replica.requests() if key[1] == "podgroups"] == [("GET", "podgroups", "404")]
