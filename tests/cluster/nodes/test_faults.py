"""What dies is replaced, and nothing else is touched."""

from collections.abc import Iterator

import pytest

from tests.cluster.jobs_on_nodes import Job, condition, is_ready, unhurried
from tests.cluster.testcluster.access import Access

MINUTES = 60.0


@pytest.fixture(scope="module")
def running(operator: Access, training: str) -> Iterator[Job]:
    """A job that goes on while its parts are killed, with one rollout on each node."""
    job = Job(operator, training, "faults")
    job.apply(unhurried("faults", failurePolicy={"maxRestarts": 10}))
    job.wait(
        "a checkpoint", lambda status: (status.get("checkpoint", {}).get("lastStep") or 0) >= 5, seconds=20 * MINUTES
    )
    yield job
    job.delete()


def uids(job: Job) -> dict[str, str]:
    """The pods that are there, by name."""
    return {name: pod["metadata"]["uid"] for name, pod in job.pods().items()}


@pytest.mark.parametrize("pod", ["faults-rollout-0", "faults-env-0"])
def test_a_killed_rollout_or_env_pod_is_replaced_alone_and_training_goes_on(running: Job, pod: str) -> None:
    before, epoch = uids(running), running.status()["epoch"]
    running.kill(pod)
    running.wait_replaced(pod, before[pod], seconds=9 * MINUTES)
    status = running.wait_steps(2, seconds=9 * MINUTES)
    assert (status["epoch"], status["totalRestarts"]) == (epoch, running.status()["totalRestarts"])
    after = uids(running)
    assert {name for name in after if after[name] != before.get(name)} == {pod}
    running.wait("all rollouts serve", lambda status: status["columns"]["rollouts"] == "2/2", seconds=9 * MINUTES)


def test_a_killed_actor_restarts_the_gang_from_its_checkpoint_and_rollouts_and_env_stay(running: Job) -> None:
    before, then = uids(running), running.status()
    running.kill("faults-actor-0")
    status = running.wait("a new epoch", lambda status: status["epoch"] == then["epoch"] + 1, seconds=3 * MINUTES)
    failed = condition(status, "Failed")
    assert (failed["status"], failed["reason"]) == ("False", "PodFailed")
    assert "faults-actor-0 ended with code 137" in failed["message"]
    status = running.wait(
        "steps after the checkpoint",
        lambda status: status["phase"] == "Running" and status["step"] > then["checkpoint"]["lastStep"],
        seconds=12 * MINUTES,
    )
    assert status["totalRestarts"] == then["totalRestarts"] + 1
    after = uids(running)
    assert {name for name in after if after[name] != before.get(name)} == {"faults-actor-0"}


def test_a_pod_deleted_by_hand_is_made_again_and_counts_as_no_failure(running: Job) -> None:
    before, then = uids(running), running.status()
    running.access.kubectl("delete", "pod", "faults-rollout-1", "-n", running.namespace, "--wait=false")
    running.wait_replaced("faults-rollout-1", before["faults-rollout-1"], seconds=12 * MINUTES)
    assert running.wait_steps(2, seconds=9 * MINUTES)["totalRestarts"] == then["totalRestarts"]


def test_the_rollout_of_a_dead_node_is_made_on_another_one_and_training_goes_on(running: Job) -> None:
    pods = running.pods()
    home = pods["faults-actor-0"]["spec"]["nodeName"]
    lost = next(name for name, pod in pods.items() if "rollout" in name and pod["spec"]["nodeName"] != home)
    node = running.access.cluster.node(pods[lost]["spec"]["nodeName"])
    epoch = running.status()["epoch"]
    node.kill()
    try:
        found = running.wait_pod(
            lost,
            "made again on the other node",
            lambda pod: (
                pod["metadata"]["uid"] != pods[lost]["metadata"]["uid"]
                and pod["spec"].get("nodeName") == home
                and is_ready(pod)
            ),
            seconds=15 * MINUTES,
        )
        assert found["spec"]["nodeName"] == home
        status = running.wait_steps(2, seconds=9 * MINUTES)
        assert status["epoch"] == epoch
    finally:
        node.start()
        node.wait_ready()
