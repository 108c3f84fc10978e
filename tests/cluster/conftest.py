"""One real cluster per test session: its control plane for all tests, its nodes for those in `nodes/`.

`cluster` starts etcd, API server, controller manager and scheduler (4 s, 450 MB, no root). `control_plane` is the same
with the RLJob resource defined, `nodes` the same with two nodes that run containers (root). All hand out one
tests.cluster.testcluster.access.Access.
"""

import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.testcluster import packages
from tests.cluster.testcluster.access import Access
from tests.cluster.testcluster.cluster import Cluster, sweep
from tests.cluster.testcluster.errors import ClusterError

NUM_NODES = 2
FAKE_GPUS = 8
CRD = Path(__file__).parents[2] / "crds" / "rljob.yaml"
TIMEOUTS = {"control_plane": 1200, "nodes": 3600}
"""Seconds a test may take with its fixtures: the first one on nodes builds the images."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests here the time that a slow machine takes; what they wait for has its own, shorter bounds."""
    for item in items:
        if item.path.parent.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUTS[item.path.parent.name]))


@pytest.fixture(scope="session")
def run_cluster() -> Callable[..., AbstractContextManager[Access]]:
    """Start a cluster for a `with` block; takes what Cluster.create does. For test files that need one of another make."""

    @contextmanager
    def run(**settings: Any) -> Iterator[Access]:
        folder = Path(tempfile.gettempdir(), f"rljob-testclusters-{os.getuid()}")
        sweep(folder)
        cluster = Cluster.create(folder / f"{os.getpid()}-{secrets.token_hex(2)}", owner=os.getpid(), **settings)
        try:
            with cluster.control_plane.kept():
                yield Access(cluster)
        finally:
            cluster.down(wait=False)

    return run


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, run_cluster: Callable[..., AbstractContextManager[Access]]
) -> Iterator[Access]:
    """A bare control plane, with the addresses of the nodes when any test of this session asks for those."""
    with_nodes = any("nodes" in item.fixturenames for item in request.session.items) and not _nodes_impossible()
    with run_cluster(nodes=NUM_NODES if with_nodes else 0, fake_gpus=FAKE_GPUS, fake_dra_gpus=FAKE_GPUS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def control_plane(cluster: Access) -> Access:
    """The control plane, which knows RLJobs."""
    cluster.define(CRD)
    return cluster


@pytest.fixture(scope="session")
def nodes(cluster: Access) -> Access:
    """The cluster with two real nodes; says what is missing where they cannot run."""
    if reason := _nodes_impossible():
        pytest.fail(f"the tests of real nodes cannot run here: {reason}", pytrace=False)
    try:
        cluster.cluster.start_nodes()
    except ClusterError as error:  # told in one line by each test that needs them
        pytest.fail(f"the nodes did not start: {error}", pytrace=False)
    return cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Access) -> Iterator[str]:
    """A namespace of the test's own, deleted afterwards; its name tells the test."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    name = f"{words[:40].rstrip('-')}-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    # It takes pods once it has its service account.
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=180s")
    yield name
    cluster.delete_namespace(name, pods_first="nodes" in request.fixturenames)


def _nodes_impossible() -> str:
    """Why no node can run on this machine; empty when it can."""
    if os.geteuid() != 0:
        return "they need root (namespaces, mounts, a network bridge)"
    if absent := packages.missing({**packages.NODES, **packages.IMAGES}):
        return f"Debian packages are missing: {', '.join(absent)}; `make cluster-deps` installs them"
    return ""
