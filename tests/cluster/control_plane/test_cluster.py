"""The test cluster's control plane does what chaos tests ask of it."""

import asyncio
from pathlib import Path

import kubernetes
import pytest

from tests.cluster.testcluster.access import Access
from tests.cluster.testcluster.cluster import Cluster
from tests.cluster.testcluster.errors import ClusterError

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one"},
    "spec": {"containers": [{"name": "main", "image": "none"}]},
}


def test_without_nodes_a_pod_waits_and_the_scheduler_says_why(cluster: Access, namespace: str) -> None:
    impossible = {**POD, "spec": {**POD["spec"], "nodeSelector": {"no": "such-node"}}}
    cluster.apply(impossible, namespace=namespace)
    cluster.kubectl("wait", "--for=condition=PodScheduled=false", "pod/one", "-n", namespace, "--timeout=180s")
    condition = cluster.get("pod", "one", namespace=namespace)["status"]["conditions"][0]
    assert condition["reason"] == "Unschedulable"
    assert "available" in condition["message"]


def test_a_scheduler_that_ended_is_started_again(cluster: Access, namespace: str) -> None:
    scheduler = cluster.cluster.control_plane.scheduler
    ended = scheduler.process
    scheduler.stop()
    test_without_nodes_a_pod_waits_and_the_scheduler_says_why(cluster, namespace)
    assert scheduler.process != ended


def test_what_is_there_is_left_as_it_is(cluster: Access) -> None:
    """A Service is refused for its address before anything looks at its name."""
    api, path = cluster.cluster.control_plane.api, "/api/v1/namespaces/default/services"
    taken = cluster.get("service", "kubernetes", namespace="default")["spec"]["clusterIP"]
    one = {"metadata": {"name": "kubernetes"}, "spec": {"clusterIP": taken, "ports": [{"port": 1}]}}
    api.create(path, one)
    assert cluster.get("service", "kubernetes", namespace="default")["spec"]["ports"][0]["port"] != 1
    with pytest.raises(ClusterError, match="already allocated"):
        api.create(path, {**one, "metadata": {"name": "another"}})


def test_the_api_server_comes_back_with_what_it_had(cluster: Access, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "kept", "-n", namespace)
    server = cluster.cluster.control_plane.api_server
    server.stop()
    assert cluster.kubectl("get", "configmaps", check=False).returncode != 0
    server.start()
    assert cluster.get("configmap", "kept", namespace=namespace)["metadata"]["name"] == "kept"


def test_a_paused_api_server_answers_when_it_goes_on(cluster: Access) -> None:
    server = cluster.cluster.control_plane.api_server
    server.pause()
    try:
        assert cluster.kubectl("get", "--raw=/readyz", "--request-timeout=1s", check=False).returncode != 0
    finally:
        server.resume()
    server.wait_ready()
    assert cluster.kubectl("get", "--raw=/readyz").stdout == "ok"


async def test_a_watch_from_before_a_compaction_is_gone(cluster: Access, namespace: str) -> None:
    old = cluster.get("namespace", namespace)["metadata"]["resourceVersion"]
    cluster.kubectl("create", "configmap", "newer", "-n", namespace)
    cluster.cluster.control_plane.compact()
    cluster.cluster.control_plane.api_server.stop()
    cluster.cluster.control_plane.api_server.start()
    async with cluster.aio_client() as client:
        core = kubernetes.aio.client.CoreV1Api(client)
        watch = kubernetes.aio.watch.Watch()
        with pytest.raises(kubernetes.aio.client.ApiException) as error:
            async for _ in watch.stream(core.list_namespaced_config_map, namespace, resource_version=old):
                await asyncio.sleep(0)
    assert error.value.status == 410


def test_pods_on_fake_nodes_run_at_once(cluster: Access, namespace: str) -> None:
    names = cluster.cluster.kwok.add_nodes(2, tainted=True)
    try:
        tolerant = {**POD["spec"], "tolerations": [{"operator": "Exists"}], "nodeSelector": {"type": "kwok"}}
        cluster.apply({**POD, "spec": tolerant}, namespace=namespace)
        cluster.kubectl("wait", "--for=condition=Ready", "pod/one", "-n", namespace, "--timeout=180s")
        assert cluster.get("pod", "one", namespace=namespace)["spec"]["nodeName"] in names
    finally:
        cluster.kubectl("delete", "pod", "one", "-n", namespace, "--ignore-not-found")
        cluster.kubectl("delete", "node", *names)


def test_a_service_account_has_its_own_rights_only(cluster: Access, namespace: str) -> None:
    kubeconfig = cluster.kubeconfig_of("default", namespace=namespace)
    answer = cluster.kubectl("--kubeconfig", kubeconfig, "get", "pods", "-n", namespace, check=False)
    assert "forbidden" in answer.stderr.lower()


def test_a_second_start_in_one_place_says_what_runs_there(cluster: Access) -> None:
    with pytest.raises(ClusterError, match=r"(?s)a cluster is here already.*kube-apiserver +running"):
        Cluster.create(cluster.cluster.state.folder)


def test_nothing_is_left_of_a_cluster_that_was_taken_down(cluster: Access, tmp_path: Path) -> None:
    second = Cluster.create(tmp_path / "second")  # beside the session's: no address of theirs is the same
    processes = [second.control_plane.etcd.process, second.control_plane.api_server.process]
    assert all(process.alive for process in processes)
    second.down()
    assert not any(process.alive for process in processes)
    assert not (tmp_path / "second").exists()
    assert cluster.kubectl("get", "--raw=/readyz").stdout == "ok"
    second.down()  # once more does no harm
