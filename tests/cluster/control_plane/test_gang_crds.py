"""Gangs where the built-in API is not served: none, or by the objects of Volcano and of coscheduling.

Their schedulers do not run here. The definitions are ours, with the fields of theirs that the operator writes: what is held is that
the operator finds the API, writes to it with the chart's rights, all of which it uses, and marks the pods.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from operator_rig.jobs import Jobs
from operator_rig.replica import home_of
from operator_rig.witness import Witness, granted
from testcluster.access import Access

from rljob_operator import kinds
from rljob_operator.manifests import gang

SECTIONS = {"actor": {"replicas": 2}, "rollout": {"replicas": 3, "minReplicas": 2}}
PODS = ("job-actor-0", "job-actor-1", "job-rollout-0", "job-rollout-1", "job-rollout-2", "job-env-0")
GANGS = {"job-actor-gang": 2, "job-rollout-gang": 2}
MARKS = {
    gang.VOLCANO: lambda pod: pod["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
    gang.COSCHEDULING: lambda pod: pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
}
"""Where a pod names its gang, as the documentation of either scheduler has it."""


def definition(kind: kinds.Kind) -> dict[str, Any]:
    """Return a CustomResourceDefinition of gang objects that knows `spec.minMember`."""
    number = {"type": "integer", "format": "int32"}
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"minMember": number}}}}
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


async def test_without_an_api_for_gangs_pods_are_in_none(jobs: Jobs, start: Callable) -> None:
    replica = await start()
    await jobs.create(**SECTIONS)
    pods = await jobs.wait_pods(*PODS)
    assert [name for name, pod in pods.items() if "schedulingGroup" in pod["spec"]] == []
    assert [name for name, pod in pods.items() for mark in MARKS.values() if mark(pod)] == []
    await replica.settle()
    assert [key for key in replica.requests() if key[1] == "podgroups"] == [("GET", "podgroups", "404")]
