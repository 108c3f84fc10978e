"""The chart's life on real nodes while a job trains: its own test, an upgrade that restarts nothing, an uninstall that keeps the job."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs_on_nodes import Job, unhurried
from tests.cluster.testcluster.access import Access

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "rljob"
SYSTEM = ("-n", "rljob-system")
MINUTES = 60.0
"""In seconds."""


@pytest.fixture(scope="module")
def running(operator: Access, training: str) -> Iterator[Job]:
    """A job with one rollout that goes on while the operator changes."""
    job = Job(operator, training, "charted")
    job.apply(unhurried("charted", rollout__replicas=1))
    job.wait("the second step", lambda status: status.get("step", 0) >= 2, seconds=20 * MINUTES)
    yield job
    job.delete()


def uids(job: Job) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in job.pods().items()}


def operators(access: Access) -> set[str]:
    found = access.get("pods", namespace="rljob-system", selector="app.kubernetes.io/name=rljob-operator")["items"]
    return {pod["metadata"]["uid"] for pod in found if "deletionTimestamp" not in pod["metadata"]}


def test_helm_test_passes_and_leaves_nothing(operator: Access) -> None:
    assert "Succeeded" in operator.helm("test", "rljob", *SYSTEM, "--timeout=10m").stdout
    assert not operator.get("rljobs", namespace="default")["items"]


def test_an_upgrade_replaces_the_operator_and_no_pod_of_a_job(operator: Access, running: Job) -> None:
    before, then, restarts = operators(operator), uids(running), running.status()["restarts"]
    words = (
        "--reuse-values",
        "--wait",
        "--timeout=10m",
        "--set",
        "settings.workers=8",
        "--set",
        "podLabels.upgraded=yes",
    )
    operator.helm("upgrade", "rljob", CHART, *SYSTEM, *words)
    assert not before & operators(operator)
    running.wait_steps(2, seconds=9 * MINUTES)
    assert uids(running) == then
    assert running.status()["restarts"] == restarts


def test_a_job_outlives_the_operator_and_is_taken_up_by_the_next(operator: Access, running: Job) -> None:
    then, restarts = uids(running), running.status()["restarts"]
    values = operator.helm("get", "values", "rljob", *SYSTEM, "-o", "json").stdout
    file = operator.cluster.state.folder / "values.json"
    file.write_text(values)
    operator.helm("uninstall", "rljob", *SYSTEM, "--wait")
    assert uids(running) == then
    operator.helm("install", "rljob", CHART, *SYSTEM, "--wait", "--timeout=10m", "--take-ownership", "-f", file)
    running.wait_steps(2, seconds=9 * MINUTES)
    assert uids(running) == then
    assert running.status()["restarts"] == restarts
