"""The test cluster's nodes run real containers, and die and come back as machines do."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.testcluster import images
from tests.cluster.testcluster.access import Access
from tests.cluster.testcluster.commands import run

SERVE = "mkdir /tmp/www; hostname > /tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"


@pytest.fixture(scope="module", autouse=True)
def busybox(nodes: Access, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of these tests, in every node."""
    archive = tmp_path_factory.mktemp("images") / "busybox.tar"
    images.write_busybox(archive)
    nodes.cluster.load([archive])
    return images.BUSYBOX_IMAGE


def pod(name: str, command: str, *, node: str | None = None, **spec: object) -> dict:
    """A pod of one shell command on a node of the test's choice."""
    container = {
        "name": "main",
        "image": images.BUSYBOX_IMAGE,
        "command": ["sh", "-c", command],
        **spec.pop("container", {}),
    }  # type: ignore[arg-type]
    selector = {"kubernetes.io/hostname": node} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": selector,
            "containers": [container],
            **spec,
        },
    }


def output(nodes: Access, namespace: str, name: str) -> str:
    """What a pod printed, once it has succeeded."""
    nodes.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "-n", namespace, "--timeout=300s")
    return nodes.kubectl("logs", name, "-n", namespace).stdout.strip()


def until_refused(fetch: str) -> str:
    """The command of a pod that asks until it is refused: it may be faster than the agent that fences it, as with every network plug-in."""
    return f"for i in $(seq 60); do {fetch} > /dev/null || {{ echo refused; exit; }}; sleep 1; done; echo let through"


def test_pods_find_each_other_by_name_across_nodes(nodes: Access, namespace: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "group"},
        "spec": {"clusterIP": "None", "selector": {"app": "server"}, "publishNotReadyAddresses": True},
    }
    server = pod("server", SERVE, node="node-1", hostname="server", subdomain="group")
    fetch = f"until wget -q -O - http://server.group.{namespace}.svc.cluster.local:8080 2>/dev/null; do sleep 0.2; done"
    nodes.apply(service, server, pod("client", fetch, node="node-2"), namespace=namespace)
    assert output(nodes, namespace, "client") == "server"


def test_the_host_reaches_a_cluster_ip(nodes: Access, namespace: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    ready = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    nodes.apply(service, pod("server", SERVE, node="node-2", container=ready), namespace=namespace)
    nodes.kubectl("wait", "--for=condition=Ready", "pod/server", "-n", namespace, "--timeout=180s")
    address = nodes.get("service", "web", namespace=namespace)["spec"]["clusterIP"]
    assert run("/bin/busybox", "wget", "-q", "-O", "-", f"http://{address}").strip() == "server"


@pytest.mark.parametrize("node", ["node-1", "node-2"], ids=["same node", "other node"])
def test_a_network_policy_lets_in_only_whom_it_names(nodes: Access, namespace: str, node: str) -> None:
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "only-friends"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "server"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}], "ports": [{"port": 8080}]}],
        },
    }
    ready = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    nodes.apply(policy, pod("server", SERVE, node="node-1", container=ready), namespace=namespace)
    nodes.kubectl("wait", "--for=condition=Ready", "pod/server", "-n", namespace, "--timeout=180s")
    address = nodes.get("pod", "server", namespace=namespace)["status"]["podIP"]
    fetch = f"timeout 5 wget -q -O - http://{address}:8080 2>/dev/null"
    nodes.apply(
        pod("friend", f"until {fetch}; do sleep 0.2; done", node=node),
        pod("stranger", until_refused(fetch), node=node),
        namespace=namespace,
    )
    assert output(nodes, namespace, "friend") == "server"
    assert output(nodes, namespace, "stranger") == "refused"


def test_a_network_policy_bounds_where_a_pod_may_go(nodes: Access, namespace: str) -> None:
    def policy(name: str, *ways: dict) -> dict:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name},
            "spec": {"podSelector": {"matchLabels": {"app": name}}, "policyTypes": ["Egress"], "egress": list(ways)},
        }

    names = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]}
    server = {"to": [{"podSelector": {"matchLabels": {"app": "server"}}}], "ports": [{"port": 8080}]}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    ready = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    nodes.apply(service, pod("server", SERVE, node="node-1", container=ready), namespace=namespace)
    nodes.kubectl("wait", "--for=condition=Ready", "pod/server", "-n", namespace, "--timeout=180s")
    fetch = "timeout 5 wget -q -O - http://web 2>/dev/null"
    nodes.apply(policy("bounded", names, server), policy("names-only", names), namespace=namespace)
    nodes.apply(
        pod("bounded", f"until {fetch}; do sleep 0.2; done", node="node-2"),
        pod("names-only", until_refused(fetch), node="node-2"),
        namespace=namespace,
    )
    assert output(nodes, namespace, "bounded") == "server"
    assert output(nodes, namespace, "names-only") == "refused"


def test_a_volume_is_writable_for_an_ordinary_user_and_empty_for_the_next_claim(nodes: Access, namespace: str) -> None:
    for name in ("first", "second"):
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        writer = pod(
            name,
            "ls /data; echo kept > /data/file; cat /data/file",
            securityContext={"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 1000},
            container={"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
            volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        )
        nodes.apply(claim, writer, namespace=namespace)
        assert output(nodes, namespace, name) == "kept"
        volume = nodes.get("pvc", name, namespace=namespace)["spec"]["volumeName"]
        nodes.kubectl("delete", f"pod/{name}", f"pvc/{name}", "-n", namespace)
        nodes.kubectl("wait", "--for=jsonpath={.status.phase}=Available", f"pv/{volume}", "--timeout=180s")
        assert nodes.get("pv", volume)["spec"].get("claimRef") is None


@pytest.fixture
def image(tmp_path: Path) -> Iterator[str]:
    """An image in the builder's store, one layer of 40 MB that nothing compresses."""
    (tmp_path / "noise").write_bytes(os.urandom(40 << 20))
    name = "localhost/noise:1"
    images.write_archive(
        name, tmp_path / "image.tar", {"bin/busybox": Path("/bin/busybox"), "noise": tmp_path / "noise"}
    )
    run("buildah", "pull", "--quiet", f"docker-archive:{tmp_path}/image.tar")
    yield name
    run("buildah", "rmi", name)


def test_a_pushed_image_runs_in_a_pod(nodes: Access, namespace: str, image: str) -> None:
    registry = nodes.cluster.state.addresses.registry
    run("buildah", "push", "--tls-verify=false", image, f"docker://{registry}/noise:1")
    puller = pod(
        "puller",
        "",
        node="node-1",
        container={"image": "registry.test/noise:1", "command": ["/bin/busybox", "wc", "-c", "/noise"]},
    )
    nodes.apply(puller, namespace=namespace)
    assert output(nodes, namespace, "puller").split()[0] == str(40 << 20)


def test_fake_gpus_come_by_device_plugin_and_by_claim(nodes: Access, namespace: str) -> None:
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "gpu.example.com"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}]},
    }
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "two"},
        "spec": {
            "devices": {"requests": [{"name": "gpus", "exactly": {"deviceClassName": "gpu.example.com", "count": 2}}]}
        },
    }
    show = "echo $NVIDIA_VISIBLE_DEVICES"
    plugin = pod("plugin", show, container={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    claimed = pod(
        "claimed",
        show,
        container={"resources": {"claims": [{"name": "gpus"}]}},
        resourceClaims=[{"name": "gpus", "resourceClaimName": "two"}],
    )
    nodes.apply(device_class, claim, plugin, claimed, namespace=namespace)
    for name in ("plugin", "claimed"):
        uuids = output(nodes, namespace, name).split(",")
        assert len(set(uuids)) == 2
        assert all(uuid.startswith("GPU-") for uuid in uuids)


def test_a_node_without_power_is_noticed_and_comes_back(nodes: Access, namespace: str) -> None:
    node = nodes.cluster.node("node-2")
    nodes.apply(pod("victim", "sleep 1000", node=node.name), namespace=namespace)
    nodes.kubectl("wait", "--for=condition=Ready", "pod/victim", "-n", namespace, "--timeout=180s")
    node.kill()
    try:
        nodes.kubectl("wait", "--for=condition=Ready=unknown", "node/node-2", "--timeout=180s")
        with pytest.raises(Exception, match="node-2 does not run"):
            node.command("true")
    finally:
        node.start()
        node.wait_ready()
    assert subprocess.run(node.command("hostname"), capture_output=True, text=True).stdout.strip() == "node-2"
    nodes.apply(pod("next", "echo back", node=node.name), namespace=namespace)
    assert output(nodes, namespace, "next") == "back"
