"""What cannot start says why, in the words of whoever refused it, and goes on by itself once the obstacle is gone."""

import time
from collections.abc import Callable

from tests.cluster.jobs_on_nodes import Job, condition, example, small

SECONDS = 240.0
"""A machine of CI is slow and shared."""


def stuck(name: str, **changes: object) -> dict:
    """A job of one rollout that will not come to train."""
    return small(name, steps=2, rollout__replicas=1, **changes)


def test_an_image_that_does_not_exist_is_named_with_the_kubelets_words(submit: Callable[[dict], Job]) -> None:
    job = submit(stuck("no-image", actor__image="registry.test/none:1", actor__initContainers=[]))
    status = job.wait(
        "told", lambda status: condition(status, "Ready").get("reason") == "ImagePullError", seconds=SECONDS
    )
    message = condition(status, "Ready")["message"]
    assert "no-image-actor-0" in message and "registry.test/none:1" in message
    assert status["phase"] == "Starting"
    assert job.row("-o", "wide")["REASON"] == "ImagePullError"


def test_a_node_selector_that_nothing_matches_is_told_in_the_schedulers_words(submit: Callable[[dict], Job]) -> None:
    job = submit(stuck("no-node", actor__nodeSelector={"zone": "nowhere"}))

    def told(status: dict) -> bool:
        scheduled = condition(status, "Scheduled")
        words = ("no-node-actor-0", "didn't match Pod's node affinity/selector")
        return scheduled.get("reason") == "Unschedulable" and all(word in scheduled["message"] for word in words)

    status = job.wait("told", told, seconds=SECONDS)
    assert status["phase"] == "Pending"


def test_a_missing_claim_makes_no_pods_and_the_job_starts_once_it_is_there(submit: Callable[[dict], Job]) -> None:
    manifest = stuck("no-claim")
    manifest["spec"]["actor"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = "later"
    job = submit(manifest)
    status = job.wait(
        "told", lambda status: condition(status, "Accepted").get("reason") == "VolumeClaimNotFound", seconds=SECONDS
    )
    assert "later" in condition(status, "Accepted")["message"]
    assert not job.pods()
    claim, _ = example()
    claim["metadata"]["name"] = "later"
    job.access.apply(claim, namespace=job.namespace)
    job.wait("accepted", lambda status: condition(status, "Accepted").get("status") == "True", seconds=SECONDS)
    job.wait("scheduled", lambda status: condition(status, "Scheduled").get("status") == "True", seconds=SECONDS)


def test_a_job_deleted_while_it_starts_leaves_nothing(submit: Callable[[dict], Job]) -> None:
    job = submit(stuck("short-lived"))
    job.wait("pods", lambda status: status.get("phase") in ("Pending", "Starting", "Running"), seconds=SECONDS)
    job.access.kubectl("delete", "rljob", "short-lived", "-n", job.namespace, "--timeout=180s")
    kinds = "pods,services,configmaps,secrets,networkpolicies"
    selector = ("-n", job.namespace, "-l", "rljob.dev/job=short-lived")
    deadline = time.monotonic() + SECONDS
    while left := job.access.get(kinds, namespace=job.namespace, selector=selector[-1])["items"]:
        assert time.monotonic() < deadline, [f"{each['kind']}/{each['metadata']['name']}" for each in left]
        time.sleep(0.5)


def test_wrong_settings_of_a_running_pod_end_the_job_with_the_processes_own_words(
    submit: Callable[[dict], Job],
) -> None:
    job = submit(stuck("no-model", model__path="/data/absent"))
    status = job.wait_phase("Failed", seconds=4 * SECONDS)
    failed = condition(status, "Failed")
    assert failed["reason"] == "InvalidConfiguration"
    assert "/data/absent" in failed["message"]
    assert status["restarts"] == 0
