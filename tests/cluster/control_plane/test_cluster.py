"""The test cluster itself: what the other tests rely on."""

from testcluster.access import Access


def test_a_namespace_takes_pods_and_the_scheduler_says_why_none_runs(control_plane: Access, namespace: str) -> None:
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one"},
            "spec": {"nodeName": None, "containers": [{"name": "main", "image": "none"}]},
        },
        namespace=namespace,
    )
    control_plane.kubectl("wait", "--for=condition=PodScheduled=false", "pod/one", "-n", namespace, "--timeout=30s")
    message = control_plane.get("pod", "one", namespace=namespace)["status"]["conditions"][0]["message"]
    assert "no nodes available" in message or "0/" in message
