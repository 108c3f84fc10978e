"""The job's NetworkPolicies on nodes that enforce them: who reaches whom is what the pure judge says, connection by connection."""

import itertools
import json
import time
from typing import Any

import pytest

from rljob_operator import manifests, naming
from tests.cluster.probes_on_nodes import create_job, one_image, probing
from tests.cluster.testcluster.access import Access
from tests.unit.operator.manifest_samples import MASTER, make_plan
from tests.unit.operator.network_policies import Endpoint, allows

SECONDS = 120.0
PORTS = (7700, 7701, 7702, 7703, 7705, 40123)
"""Hub, channel, control, health (served by the supervisor), worker RPC, and one that gloo might have."""
LISTEN = f"""
import socket, time
held = []
for port in {PORTS}:
    try:
        held.append(socket.create_server(("0.0.0.0", port)))
    except OSError:
        pass
print("listening", flush=True)
time.sleep(600)
"""
CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def reach(target):
    try:
        socket.create_connection(target, timeout=3).close()
        return True
    except OSError:
        return False

targets = [tuple(target) for target in json.load(sys.stdin)]
with ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(reach, targets))))
"""


def outsider(name: str, image: str, **labels: str) -> dict[str, Any]:
    """A pod that is not of the job."""
    container = {"name": "main", "image": image, "command": ["python", "-c", LISTEN]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    }


@pytest.fixture
def world(
    control_plane: Access, nodes: Access, namespace: str
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The policies and the running pods of a job and its neighbourhood; the operator lives in the same namespace here."""
    config = one_image(nodes, namespace=namespace)
    job = create_job(nodes, namespace, {"actor": {"replicas": 2}, "rollout": {}, "env": {}})
    objects = manifests.support.build(job, config=config)
    plan = probing(make_plan(job), LISTEN)
    neighbours = [
        outsider("stranger", config.images["env"], app="web"),
        outsider("operator", config.images["env"], **{naming.LABEL_NAME: naming.OPERATOR_APP}),
    ]
    pods = [manifests.pods.build(job, pod, config=config) for pod in plan.pods]
    nodes.apply(*objects, manifests.secret.build(job, master=MASTER), *pods, *neighbours, namespace=namespace)
    names = [pod["metadata"]["name"] for pod in (*pods, *neighbours)]
    for name in names:
        nodes.kubectl(
            "wait", "--for=jsonpath={.status.phase}=Running", f"pod/{name}", "-n", namespace, "--timeout=300s"
        )
    _wait_listening(nodes, namespace, names)
    found = {name: nodes.get("pod", name, namespace=namespace) for name in names}
    return [o for o in objects if o["kind"] == "NetworkPolicy"], found


def _wait_listening(nodes: Access, namespace: str, names: list[str]) -> None:
    for name in names:
        nodes.kubectl("exec", name, "-n", namespace, "--", "python", "-c", WAIT_LISTENING)


WAIT_LISTENING = f"""
import socket, time
end = time.monotonic() + 180
while socket.socket().connect_ex(("127.0.0.1", {PORTS[-1]})) and time.monotonic() < end:
    time.sleep(0.2)
"""


def endpoint(pod: dict[str, Any]) -> Endpoint:
    """Return the judge's view of a real pod."""
    meta = pod["metadata"]
    here = {naming.LABEL_NAMESPACE: meta["namespace"]}
    return Endpoint(
        namespace=meta["namespace"], labels=meta["labels"], namespace_labels=here, ip=pod["status"]["podIP"]
    )


def test_pods_reach_whom_the_judge_lets_them_and_nobody_else(nodes, namespace, world):
    policies, pods = world
    listening = {name: [port for port in PORTS if port != 7703 or name.startswith("sums-")] for name in pods}

    def differences(source: str) -> list[str]:
        targets = [(name, port) for name in pods if name != source for port in listening[name]]
        addresses = json.dumps([(pods[name]["status"]["podIP"], port) for name, port in targets])
        done = nodes.kubectl("exec", "-i", source, "-n", namespace, "--", "python", "-c", CONNECT, stdin=addresses)
        return [
            f"{source} -> {name}:{port} was {'open' if reached else 'closed'}"
            for (name, port), reached in zip(targets, json.loads(done.stdout), strict=True)
            if reached != allows(policies, endpoint(pods[source]), endpoint(pods[name]), port)
        ]

    deadline = time.monotonic() + SECONDS  # the nodes' agents may be slower than the pods they fence
    for source in pods:
        while found := differences(source):
            assert time.monotonic() < deadline, found
    verdicts = {
        allows(policies, endpoint(pods[a]), endpoint(pods[b]), port)
        for a, b in itertools.permutations(pods, 2)
        for port in PORTS
    }
    assert verdicts == {True, False}
