"""Fixtures of the operator's tests on the real control plane."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_operator.runtime import master_key
from rljob_operator.runtime.cluster import ApiCluster
from tests.cluster.operator_rig.jobs import Jobs
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.replica import LEASE_SECONDS, Replica, home_of
from tests.cluster.testcluster.access import Access

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "rljob"
AUDIENCE = "sts.amazonaws.com"
"""Audience of the tokens that a webhook may add to the pods of jobs."""


@pytest.fixture
async def jobs(control_plane: Access, namespace: str) -> AsyncIterator[Jobs]:
    """The test's namespace, seen by the administrator."""
    async with control_plane.aio_client() as client:
        yield Jobs(ApiCluster(client), namespace)


@pytest.fixture
async def kubelet(jobs: Jobs) -> AsyncIterator[Kubelet]:
    """A node whose pods run as soon as they are bound."""
    async with Kubelet(jobs.api, namespace=jobs.namespace) as kubelet:
        yield kubelet


@pytest.fixture
def home(control_plane: Access, namespace: str) -> Iterator[str]:
    """The namespace of the operator that serves the test's."""
    name = home_of(namespace)
    control_plane.core.create_namespace({"metadata": {"name": name}})
    yield name
    control_plane.core.delete_namespace(name)


@pytest.fixture
async def start(control_plane: Access, namespace: str, home: str) -> AsyncIterator[Callable[..., Awaitable[Replica]]]:
    """Start replicas of the operator for the test's namespace; all are stopped at the end."""
    replicas: list[Replica] = []

    async def start(**settings: Any) -> Replica:
        replicas.append(Replica(settings.pop("kubeconfig", control_plane.kubeconfig), namespace, **settings))
        return await replicas[-1].start()

    yield start
    for replica in replicas:
        await replica.stop()


@pytest.fixture
def process(
    control_plane: Access, namespace: str, home: str, tmp_path: Path
) -> Iterator[Callable[..., tuple[subprocess.Popen, Path]]]:
    """Start the operator of a tree as a process of its own; returns it and the file of its log. Settings are named as in settings.py."""
    started = []

    def start(name: str, *, root: Path = ROOT, **settings: str) -> tuple[subprocess.Popen, Path]:
        log = tmp_path / f"{name}.log"
        settings = {
            "NAMESPACE": home,
            "WATCH_NAMESPACES": namespace,
            "IDENTITY": name,
            "METRICS_PORT": "0",
            "METRICS_HOST": "127.0.0.1",
            "LEASE_SECONDS": str(LEASE_SECONDS),
            **settings,
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(control_plane.kubeconfig),
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'operator'}",
        }
        environment |= {f"RLJOB_OPERATOR_{key}": value for key, value in settings.items()}
        with log.open("w") as file:
            command = [sys.executable, "-m", "rljob_operator"]
            started.append(subprocess.Popen(command, env=environment, stderr=file, cwd=root))
        return started[-1], log

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def rights(control_plane: Access, namespace: str, home: str) -> Iterator[list[dict]]:
    """Install the chart's account, roles, bindings and policies for the test's namespace; hands out the rules."""
    text = control_plane.helm(
        "template",
        "rljob",
        CHART,
        "-n",
        home,
        "--set",
        f"watchNamespaces={{{namespace}}},policy.allowedTokenAudiences={{{AUDIENCE}}}",
    ).stdout
    policies = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    wanted = ("ServiceAccount", "Role", "RoleBinding", *policies)
    objects = [
        o
        for o in yaml.safe_load_all(text)
        if o and o["kind"] in wanted and "helm.sh/hook" not in o["metadata"].get("annotations", {})
    ]
    for obj in objects:
        control_plane.apply(obj, namespace=obj["metadata"].get("namespace", home))
    account = f"--as=system:serviceaccount:{home}:rljob-operator"
    last = ((home, "get", f"secrets/{master_key.NAME}"), (namespace, "create", "events"))  # of either role

    def granted() -> bool:
        asking = ("auth", "can-i", account, "-n")
        return all(control_plane.kubectl(*asking, *right, check=False).stdout.strip() == "yes" for right in last)

    control_plane.cluster.control_plane.api_server.wait("the account's rights", granted)
    yield [rule for obj in objects if obj["kind"] == "Role" for rule in obj["rules"]]
    for obj in objects:
        if obj["kind"] in policies:
            control_plane.kubectl("delete", obj["kind"], obj["metadata"]["name"], "--wait=false")


@pytest.fixture
def account(control_plane: Access, rights: list[dict], namespace: str, home: str) -> Path:
    """The kubeconfig of the chart's service account, once its policies are in force."""
    found = control_plane.kubeconfig_of("rljob-operator", namespace=home)
    owner = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "name": "x",
        "uid": "0b7c1a2d-3e4f-4a5b-8c6d-7e8f9a0b1c2d",
    }
    owned = {"name": "stray", "ownerReferences": [owner | {"controller": True}]}
    host = {"hostNetwork": True, "containers": [{"name": "c", "image": "c"}]}
    strays = {
        "objects": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "stray"}},
        "pods": {"apiVersion": "v1", "kind": "Pod", "metadata": owned, "spec": host},
        "secrets": {"apiVersion": "v1", "kind": "Secret", "metadata": owned},
    }
    words = ("create", "--dry-run=server", "-n", namespace, "-f", "-", "--kubeconfig", found)

    def in_force() -> bool:
        """Each policy comes into force by itself."""
        said = {
            one: control_plane.kubectl(*words, stdin=json.dumps(stray), check=False).stderr
            for one, stray in strays.items()
        }
        return all(f"-{one}' with binding" in text for one, text in said.items())

    control_plane.cluster.control_plane.api_server.wait("the policies of the operator's account", in_force)
    return found
