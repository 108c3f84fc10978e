"""The product on real nodes: images of this tree's Dockerfiles, the operator of its chart, and jobs as people apply them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs_on_nodes import REWARD, SHARED, UNHURRIED, Job, example, host_claim, readable_by_pods
from tests.cluster.testcluster.access import Access

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "e2e" / "make_tiny.py"
NAMESPACE = "training"
"""Jobs that need a model share one namespace, so that its volume is prepared once."""


@pytest.fixture(scope="session")
def images(nodes: Access) -> dict[str, str]:
    """References of the images by role, built from this tree and in the cluster's registry."""
    command = [sys.executable, "-m", "worker_images.build", "--push", nodes.cluster.state.addresses.registry]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def operator(nodes: Access, images: dict[str, str]) -> Access:
    """The cluster with the chart installed and no job yet."""
    values = [word for role, image in images.items() for word in ("--set", f"images.{role}={image}")]
    nodes.kubectl("delete", "crd", "rljobs.rljob.dev", "--ignore-not-found")
    words = ("-n", "rljob-system", "--create-namespace", "--wait", "--timeout=10m")
    nodes.helm("install", "rljob", ROOT / "helm" / "rljob", *words, *values)
    return nodes


@pytest.fixture(scope="session")
def training(operator: Access) -> str:
    """The namespace of the jobs that train, with the claim on which the first of them prepares model and data."""
    operator.kubectl("create", "namespace", NAMESPACE)
    operator.kubectl("wait", "--for=create", "serviceaccount/default", "-n", NAMESPACE, "--timeout=180s")
    claim, _ = example()
    operator.apply(claim, UNHURRIED, namespace=NAMESPACE)
    return NAMESPACE


@pytest.fixture(scope="session")
def shared(operator: Access, training: str) -> Path:
    """A folder of this machine as a claim that pods of both nodes write to, with model and data in it."""
    folder = host_claim(operator, training, SHARED)
    subprocess.run([sys.executable, TINY, folder], check=True, timeout=600)
    readable_by_pods(folder)
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "letters"}, "data": {"reward.py": REWARD}}
    operator.apply(code, namespace=training)
    return folder


@pytest.fixture
def submit(operator: Access, training: str) -> Iterator[Callable[[dict], Job]]:
    """Apply a job of the training namespace; it is deleted at the end, and what it left then is told when the test fails."""
    jobs: list[Job] = []

    def submit(manifest: dict) -> Job:
        jobs.append(Job(operator, training, manifest["metadata"]["name"]))
        jobs[-1].apply(manifest)
        return jobs[-1]

    yield submit
    for job in jobs:
        job.delete()
