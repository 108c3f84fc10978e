"""Gangs by the built-in API: a control plane of its own that serves it, its scheduler, and the operator with the chart's rights.

The nodes are kwok's, with one accelerator each: an actor of two pods needs both.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rljob_operator import kinds
from rljob_operator.manifests import gang
from rljob_operator.model import OperatorConfig
from tests.cluster.operator_rig.jobs import Jobs, until
from tests.cluster.operator_rig.witness import Witness, granted
from tests.cluster.testcluster.access import Access
from tests.unit.operator.manifest_samples import make_job

CRD = Path(__file__).parents[3] / "crds" / "rljob.yaml"
GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
GROUP = kinds.of(gang.BUILT_IN, gang.KIND)
ACTOR = {"replicas": 2, "gpus": 1}
OTHERS = ("job-rollout-0", "job-rollout-1", "job-env-0")
EVERYTHING = ("job-actor-0", "job-actor-1", *OTHERS)


@pytest.fixture(scope="module")
def cluster(run_cluster: Callable[..., AbstractContextManager[Access]]) -> Iterator[Access]:
    """A control plane that serves the API, with two fake nodes of one accelerator."""
    with run_cluster(
        api_server_args=[GATES, f"--runtime-config={gang.BUILT_IN}=true"],
        controller_manager_args=[GATES],
        scheduler_args=[GATES],
    ) as cluster:
        cluster.cluster.kwok.add_nodes(2, capacity={"nvidia.com/gpu": "1"})
        yield cluster


@pytest.fixture(scope="module")
def control_plane(cluster: Access) -> Access:
    """The same, which knows RLJobs."""
    cluster.define(CRD)
    return cluster


@pytest.fixture
def one_node(cluster: Access) -> Iterator[Callable[[], object]]:
    """Only one node takes pods, until what this returns is called."""

    def open_other() -> object:
        return cluster.kubectl("uncordon", "fake-1")

    cluster.kubectl("cordon", "fake-1")
    yield open_other
    open_other()


@pytest.fixture(autouse=True)
def _free_nodes(cluster: Access) -> None:
    """Wait until the pods of the test before have left the nodes."""
    program = cluster.cluster.kwok.program
    program.wait(
        "free nodes", lambda: not cluster.core.list_pod_for_all_namespaces(field_selector="spec.nodeName!=").items
    )


def nodes_of(pods: dict[str, dict[str, Any]]) -> list[str]:
    """Return the nodes that actor pods are bound to."""
    return sorted(
        pod["spec"]["nodeName"] for name, pod in pods.items() if "-actor-" in name and "nodeName" in pod["spec"]
    )


async def scheduled(jobs: Jobs, status: str) -> dict[str, Any]:
    """Wait until the scheduler says of the job's only PodGroup whether it has room; return the group."""

    async def told() -> dict[str, Any] | None:
        groups = await jobs.list(GROUP)
        assert len(groups) <= 1
        found = [
            c for g in groups for c in g.get("status", {}).get("conditions", []) if c["type"] == "PodGroupScheduled"
        ]
        return groups[0] if [c["status"] for c in found] == [status] else None

    return await until(told, f"PodGroupScheduled={status}")


async def bound(jobs: Jobs, *names: str) -> None:
    """Wait until these pods are bound to nodes."""

    async def all_bound() -> bool:
        pods = await jobs.pods()
        return all(name in pods and "nodeName" in pods[name]["spec"] for name in names)

    await until(all_bound, f"{', '.join(names)} bound")


def important_group(access: Access, namespace: str) -> dict[str, Any]:
    """Return the PodGroup of an actor with a priority class, strictly checked and taken by the API server without a warning."""
    access.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 10}
    )
    job = make_job(namespace=namespace, actor=ACTOR | {"priorityClassName": "high"})
    (group,) = gang.manifests(job, config=OperatorConfig(gang_api=gang.BUILT_IN)).objects
    done = access.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(group)
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_group_is_taken_as_it_is_written(control_plane: Access, namespace: str) -> None:
    spec = important_group(control_plane, namespace)["spec"]
    assert spec["schedulingPolicy"] == {"gang": {"minCount": 2}}
    assert "priority" not in spec, "groups have none without their gate, and the server drops the class without a word"


def test_the_group_has_the_priority_of_its_pods_where_groups_have_one(
    run_cluster: Callable[..., AbstractContextManager[Access]],
) -> None:
    gates = f"{GATES},WorkloadAwarePreemption=true"
    with run_cluster(api_server_args=[gates, f"--runtime-config={gang.BUILT_IN}=true"]) as access:
        assert important_group(access, "default")["spec"]["priority"] == 10


async def test_an_actor_gets_its_group_under_the_charts_rights_which_are_all_used(
    jobs: Jobs, start: Callable, account: Path, rights: list[dict]
) -> None:
    witness = Witness()
    replica = await start(kubeconfig=account, wrap=witness.wrap)
    job = await jobs.create(actor=ACTOR)
    pods = await jobs.wait_pods(*EVERYTHING)
    group = await scheduled(jobs, "True")
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}
    assert [owner["uid"] for owner in group["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    named = {name: pod["spec"].get("schedulingGroup") for name, pod in pods.items()}
    member = {"podGroupName": group["metadata"]["name"]}
    assert named == {"job-actor-0": member, "job-actor-1": member} | dict.fromkeys(OTHERS)
    await replica.wait_watched(GROUP.plural)
    await replica.settle()
    assert witness.refused == []
    used = {right for right in witness.used | {("watch", GROUP.group, GROUP.plural)} if right[1] == GROUP.group}
    assert used == {right for right in granted(rights) if right[1] == GROUP.group}


async def test_with_room_for_one_pod_none_of_the_gang_is_bound_and_with_room_for_both_all_are(
    jobs: Jobs, start: Callable, account: Path, one_node: Callable[[], object]
) -> None:
    await start(kubeconfig=account)
    await jobs.create(actor=ACTOR)
    await bound(jobs, *OTHERS)
    await scheduled(jobs, "False")

    async def told_what_is_short() -> bool:
        status, reason, message = await jobs.condition("Scheduled")
        return (status, reason) == ("False", "Unschedulable") and "Insufficient nvidia.com/gpu" in message

    await until(told_what_is_short, "the job's condition Scheduled to say what the gang lacks")
    assert nodes_of(await jobs.pods()) == []
    one_node()
    await bound(jobs, *EVERYTHING)
    assert nodes_of(await jobs.pods()) == ["fake-0", "fake-1"]


async def test_a_job_that_wants_none_has_no_group_and_takes_what_room_there_is(
    jobs: Jobs, start: Callable, account: Path, one_node: Callable[[], object]
) -> None:
    await start(kubeconfig=account)
    await jobs.create(actor=ACTOR, scheduling={"gang": "none"})
    await bound(jobs, *OTHERS)
    await jobs.wait_condition("Scheduled", "False", "Unschedulable")

    async def one_bound() -> bool:
        return nodes_of(await jobs.pods()) == ["fake-0"]

    await until(one_bound, "one pod of the actor bound to the only node")
    pods = await jobs.pods()
    assert await jobs.list(GROUP) == []
    assert [name for name, pod in pods.items() if "schedulingGroup" in pod["spec"]] == []


async def test_a_restarted_gang_is_bound_again_in_the_same_group(jobs: Jobs, start: Callable, account: Path) -> None:
    await start(kubeconfig=account)
    await jobs.create(actor=ACTOR)
    group = await scheduled(jobs, "True")
    await bound(jobs, *EVERYTHING)
    await jobs.wait_roles("active", actor=2)
    before = {name: pod["metadata"]["uid"] for name, pod in (await jobs.pods(role="actor")).items()}
    await jobs.delete_pod("job-actor-1")

    async def replaced() -> bool:
        pods = await jobs.pods(role="actor")
        return pods.keys() == before.keys() and not {pod["metadata"]["uid"] for pod in pods.values()} & {
            *before.values()
        }

    await until(replaced, "two new actor pods")
    await bound(jobs, *EVERYTHING)
    pods = await jobs.pods(role="actor")
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in pods.values()} == {group["metadata"]["name"]}
    assert [one["metadata"]["uid"] for one in await jobs.list(GROUP)] == [group["metadata"]["uid"]]


async def test_a_deleted_job_takes_its_group_with_it(jobs: Jobs, start: Callable, account: Path) -> None:
    await start(kubeconfig=account)
    await jobs.create(actor=ACTOR)
    group = await scheduled(jobs, "True")
    await jobs.delete()
    await jobs.wait_gone(GROUP, group["metadata"]["name"])
    await jobs.wait_pods()


async def test_a_job_made_anew_is_not_in_the_group_its_forerunner_left_behind(
    control_plane: Access, jobs: Jobs, start: Callable, account: Path
) -> None:
    """A group is kept while pods name it: pods that took the old one over would hold it for good."""
    await start(kubeconfig=account)
    await jobs.create(actor=ACTOR)
    old = await scheduled(jobs, "True")
    controllers = control_plane.cluster.control_plane.controller_manager
    controllers.pause()  # they let go of the group; the garbage collector is one of them, so its work is done here
    try:
        await jobs.delete()
        await jobs.api.delete(GROUP, jobs.namespace, old["metadata"]["name"], uid=old["metadata"]["uid"])
        for name in EVERYTHING:
            await jobs.delete_pod(name, now=True)
        job = await jobs.create(actor=ACTOR)
        await jobs.wait_pods(*EVERYTHING)
    finally:
        controllers.resume()
    await jobs.wait_gone(GROUP, old["metadata"]["name"])
    new = await scheduled(jobs, "True")
    assert [owner["uid"] for owner in new["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
