"""Accelerators on real nodes: each process of the real supervisor sees those it asked for and no others, by device plugin and by claim.

The GPUs are the cluster's fakes; the supervisor's audit reads them through a stub of NVML, which answers from NVIDIA_VISIBLE_DEVICES
as the container runtime set it. In place of the workers a probe tells what a process of that pod sees.
"""

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_core.plan.colocated import colocate
from rl_core.plan.launch import LaunchPlan
from rljob_operator import manifests
from rljob_operator.model import OperatorConfig
from tests.cluster.nvml_stub import build as build_stub
from tests.cluster.probes_on_nodes import create_job, one_image, probing
from tests.cluster.testcluster.access import Access
from tests.unit.operator.manifest_samples import MASTER, make_plan

SECONDS = 300.0
DRA = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
DEVICE_CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "gpu.example.com"},
    "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}]},
}
STUB = {
    "env": {"LD_LIBRARY_PATH": "/nvml"},
    "volumes": [{"name": "nvml", "configMap": {"name": "nvml"}}],
    "volumeMounts": [{"name": "nvml", "mountPath": "/nvml"}],
}
PROBE = """
import json, os, signal, sys, time
from rl_core.api.identity import Identity
from rl_core.plan.placement import Placement
from rl_core.transports.curve import KeyRing
from rl_core.workers.devices import device_uuids

def writable(folder):
    try:
        open(os.path.join(folder, "probe"), "w").close()
        return True
    except OSError:
        return False

identity = Identity.from_env()
print("PROBE " + json.dumps({
    "process": identity.name,
    "uuids": device_uuids(tuple(Placement.from_env().visible_accelerators)),
    "pod_ip": identity.pod_ip,
    "user": os.getuid(),
    "keys": sorted(name for name in os.listdir(identity.curve_dir) if not name.startswith(".")),
    "publics": len(KeyRing(identity.curve_dir, identity.role).publics),
    "job": json.load(open(identity.config))["metadata"]["uid"] if identity.config else None,
    "writable": [folder for folder in ("/tmp", "/dev/shm", "/", "/etc/rljob/keys") if writable(folder)],
    "account": os.path.exists("/var/run/secrets/kubernetes.io"),
    "host": os.uname().nodename,
}), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A started pod: where it runs, and what each process saw by container and process name."""

    node: str
    ip: str
    processes: dict[str, dict[str, Any]]
    log: str

    def uuids(self, role: str) -> list[str]:
        """UUIDs seen by the processes of a role, in order of ranks."""
        named = sorted(name for name in self.processes if name.startswith(f"{role}:"))
        return [uuid for name in named for uuid in self.processes[name]["uuids"]]


@pytest.fixture(scope="module")
def config(nodes: Access) -> OperatorConfig:
    """All roles run the env image: the smallest with the supervisor in it."""
    return one_image(nodes)


@pytest.fixture
def started(
    control_plane: Access, nodes: Access, namespace: str, config: OperatorConfig, tmp_path: Path
) -> Iterator[Callable[..., dict[str, Probed]]]:
    """Start the pods of a job as the operator does, but with probes, and wait until each process has told what it sees."""
    library = base64.b64encode(build_stub(tmp_path).read_bytes()).decode()
    stub = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "nvml"},
        "binaryData": {"libnvidia-ml.so.1": library},
    }
    nodes.apply(DEVICE_CLASS, stub, namespace=namespace)
    nodes.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def start(
        change: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan, **roles: dict[str, Any]
    ) -> dict[str, Probed]:
        job = create_job(nodes, namespace, {role: {**STUB, **fields} for role, fields in roles.items()})
        plan = probing(change(make_plan(job)), PROBE)
        nodes.apply(
            *manifests.support.build(job, config=config),
            manifests.secret.build(job, master=MASTER),
            *(manifests.pods.build(job, pod, config=config) for pod in plan.pods),
            namespace=namespace,
        )
        return {pod.name: _wait_probed(nodes, namespace, pod.name, _processes(plan, pod.name)) for pod in plan.pods}

    yield start


def _processes(plan: LaunchPlan, name: str) -> int:
    return sum(len(container.processes) for pod in plan.pods if pod.name == name for container in pod.containers)


def _wait_probed(nodes: Access, namespace: str, name: str, expected: int) -> Probed:
    deadline = time.monotonic() + SECONDS
    while True:
        logs = nodes.kubectl("logs", name, "-n", namespace, "--all-containers", "--prefix", check=False).stdout
        lines = [json.loads(line.partition("PROBE ")[2]) for line in logs.splitlines() if "PROBE " in line]
        pod = nodes.get("pod", name, namespace=namespace)
        if len(lines) == expected and "podIP" in pod["status"]:
            break
        assert time.monotonic() < deadline, (name, pod["status"], logs)
        time.sleep(0.5)
    return Probed(
        node=pod["spec"]["nodeName"],
        ip=pod["status"]["podIP"],
        processes={line["process"]: line for line in lines},
        log=logs,
    )


def assert_disjoint(pods: dict[str, Probed]) -> None:
    """Assert that no accelerator of a node is seen by two processes."""
    seen = Counter(
        (pod.node, uuid) for pod in pods.values() for line in pod.processes.values() for uuid in line["uuids"]
    )
    assert seen and set(seen.values()) == {1}, seen


@pytest.mark.parametrize("allocation", [{}, DRA], ids=["device plugin", "claims"])
def test_each_process_sees_the_accelerators_it_was_given_and_no_others(started, allocation):
    pods = started(
        actor={"gpus": 4, "processesPerPod": 2} | allocation, rollout={"replicas": 3, "gpus": 2} | allocation, env={}
    )
    counts = {name: [len(line["uuids"]) for line in pod.processes.values()] for name, pod in pods.items()}
    assert counts == {
        "sums-actor-0": [2, 2],
        "sums-rollout-0": [2],
        "sums-rollout-1": [2],
        "sums-rollout-2": [2],
        "sums-env-0": [0],
    }
    assert_disjoint(pods)
    for name, pod in pods.items():
        told = {uuid for line in pod.processes.values() for uuid in line["uuids"]}
        audit = next((line for line in pod.log.splitlines() if "accelerators: " in line), "")
        assert all(uuid in audit for uuid in told) and bool(audit) == bool(told), name


def test_a_process_in_a_pod_is_who_the_plan_says_and_may_do_no_more(started):
    pods = started(actor={}, rollout={}, env={})
    publics = ["actor.public", "channel.public", "env.public", "rollout.public", "runner.public", "supervisor.public"]
    for role in ("actor", "rollout", "env"):
        pod = pods[f"sums-{role}-0"]
        line = pod.processes[f"{role}:0"]
        assert line["host"] == f"sums-{role}-0" and line["pod_ip"] == pod.ip
        assert line["user"] == 1000 and line["account"] is False
        assert line["writable"] == ["/tmp", "/dev/shm"] and line["publics"] == len(publics)
        assert line["keys"] == sorted([f"{role}.secret", *publics])
        assert (line["job"] is not None) == (role == "actor")


@pytest.mark.parametrize(
    ("shape", "allocation"),
    [("containers", DRA), ("processes", {})],
    ids=["two containers, one claim", "one container, device plugin"],
)
def test_colocated_actor_and_rollout_see_the_same_accelerators(started, shape, allocation):
    role = {"gpus": 2, "replicas": 2} | allocation
    pods = started(lambda plan: colocate(plan, shape=shape), actor=role | {"processesPerPod": 1}, rollout=role, env={})
    pairs = []
    for index in (0, 1):
        actor = pods[f"sums-actor-{index}"]
        assert actor.uuids("actor") == actor.processes[f"actor:{index}"]["uuids"] and len(actor.uuids("actor")) == 2
        assert sorted(actor.uuids("rollout")) == sorted(actor.uuids("actor"))
        pairs.append({(actor.node, uuid) for uuid in actor.uuids("actor")})
    assert not pairs[0] & pairs[1]


def test_a_pod_whose_accelerators_are_not_there_ends_as_a_configuration_error_and_says_why(
    control_plane, nodes, namespace, config, tmp_path, started
):
    """The plan asks for two, the pod for none: as with a device plugin that gives none, or a runtime without it."""
    job = create_job(nodes, namespace, {"rollout": {**STUB, "gpus": 2}})
    (planned,) = (pod for pod in probing(make_plan(job), PROBE).pods if pod.role == "rollout")
    pod = manifests.pods.build(job, planned, config=config)
    pod["spec"]["containers"][0]["resources"] = {}
    nodes.apply(manifests.secret.build(job, master=MASTER), pod, namespace=namespace)
    nodes.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Failed", "pod/sums-rollout-0", "-n", namespace, "--timeout=300s"
    )
    (status,) = nodes.get("pod", "sums-rollout-0", namespace=namespace)["status"]["containerStatuses"]
    ended = status["state"]["terminated"]
    word = json.loads(ended["message"])
    assert ended["exitCode"] == word["code"] == 2
    assert word["reason"].startswith("accelerators 0,1 were asked for and must be visible, got:")
    assert "PROBE" not in nodes.kubectl("logs", "sums-rollout-0", "-n", namespace).stdout
