"""What stands in a job's way is in its status within one reconcile, in the cluster's own words, and goes away when the cause does."""

import asyncio
import base64
import contextlib
from collections.abc import Iterator

import pytest

from rljob_operator import kinds, naming
from rljob_operator.errors import NotFound
from rljob_operator.kinds import Kind
from rljob_operator.runtime import master_key
from tests.cluster.operator_rig.jobs import IMAGE, STANDARD, Jobs, until
from tests.cluster.operator_rig.replica import home_of
from tests.cluster.testcluster.access import Access

QUOTA = Kind(group="", version="v1", kind="ResourceQuota", plural="resourcequotas")


async def test_an_exceeded_quota_is_told_and_the_job_goes_on_when_it_is_raised(jobs: Jobs, start, kubelet) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    await jobs.api.create(QUOTA, jobs.namespace, quota)

    async def counted() -> bool:
        found = await jobs.api.read(QUOTA, jobs.namespace, "few")
        return "used" in found.get("status", {})

    await until(counted, "the quota to be counted")
    replica = await start()
    await jobs.create()
    message = await jobs.wait_condition("Scheduled", "False", "QuotaExceeded")
    assert "exceeded quota: few" in message
    tries = replica.writes().get(("POST", "pods", "403"), 0)
    await asyncio.sleep(3.0)
    assert replica.writes()["POST", "pods", "403"] - tries <= 8, "refused creates are not repeated without a pause"
    await jobs.api.patch(QUOTA, jobs.namespace, "few", {"spec": {"hard": {"pods": "20"}}})
    await jobs.wait_pods(*STANDARD)
    await jobs.wait_condition("Scheduled", "True")


@contextlib.contextmanager
def refused(access: Access, namespace: str, operation: str, group: str, resource: str) -> Iterator[None]:
    """Have the API server refuse an operation in a namespace, as the webhook that it asks fails."""
    webhook = {
        "name": "nobody.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [group], "apiVersions": ["*"], "operations": [operation], "resources": [resource]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind, name = "ValidatingWebhookConfiguration", f"nobody-{namespace}"
    meta = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
    access.apply(meta | {"webhooks": [webhook]})
    try:
        yield
    finally:
        access.kubectl("delete", kind, name)


async def in_force(access: Access, namespace: str, *update: str) -> None:
    """Wait until the API server refuses an update by kubectl, which is not carried out."""

    async def reported() -> bool:
        done = access.kubectl("patch", "-n", namespace, "--type=merge", "--dry-run=server", *update, check=False)
        return "failed calling webhook" in done.stderr

    await until(reported, "the webhook to be asked")


async def test_a_webhook_that_fails_is_told_and_not_asked_without_a_pause(
    control_plane: Access, jobs: Jobs, start, kubelet
) -> None:
    with refused(control_plane, jobs.namespace, "CREATE", "", "pods"):
        replica = await start()
        await jobs.create()
        message = await jobs.wait_condition("Scheduled", "False", "CreateRefused")
        assert 'failed calling webhook "nobody.example.com"' in message
        tries = replica.writes().get(("POST", "pods", "500"), 0)
        await asyncio.sleep(3.0)
        assert replica.writes()["POST", "pods", "500"] - tries <= 8
    await jobs.wait_pods(*STANDARD)


async def test_no_pod_is_created_under_an_edited_network_policy_that_cannot_be_restored(
    control_plane: Access, jobs: Jobs, start, kubelet
) -> None:
    replica = await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    await replica.stop()
    opened = {"spec": {"ingress": [{}]}}
    await jobs.api.patch(kinds.NETWORK_POLICY, jobs.namespace, "job-env", opened)
    await jobs.delete_pod("job-env-0", now=True)
    with refused(control_plane, jobs.namespace, "UPDATE", "networking.k8s.io", "networkpolicies"):
        await in_force(control_plane, jobs.namespace, "networkpolicy/job-env", '-p={"spec": {"ingress": []}}')
        replica = await start()
        message = await jobs.wait_condition("Scheduled", "False", "CreateRefused")
        assert "NetworkPolicy/job-env: " in message and "failed calling webhook" in message
        await replica.settle(quiet=1.0)
        assert "job-env-0" not in await jobs.pods()
    await jobs.wait_pods(*STANDARD)
    assert (await jobs.api.read(kinds.NETWORK_POLICY, jobs.namespace, "job-env"))["spec"]["ingress"] != [{}]


async def test_a_status_that_is_refused_stops_no_pod_and_is_written_later(
    control_plane: Access, jobs: Jobs, start, kubelet
) -> None:
    await jobs.create()
    with refused(control_plane, jobs.namespace, "UPDATE", "rljob.dev", "rljobs/status"):
        words = ("rljob/job", "--subresource=status", '-p={"status": {"phase": "Pending", "epoch": 0}}')
        await in_force(control_plane, jobs.namespace, *words)
        await start()
        await jobs.wait_pods(*STANDARD)

        async def reported() -> list[dict]:
            return await jobs.events("StatusRefused")

        (event, *_) = await until(reported, "an event about the status")
        assert "failed calling webhook" in event["message"]
        assert not (await jobs.get()).get("status")
    await jobs.wait_condition("Scheduled", "True")


async def test_an_image_that_cannot_be_pulled_is_told(jobs: Jobs, start, kubelet) -> None:
    words = f'Back-off pulling image "{IMAGE}"'
    kubelet.failing["job-rollout-0"] = ("ImagePullBackOff", words)
    await start()
    await jobs.create()

    async def reported() -> bool:
        conditions = (await jobs.get()).get("status", {}).get("conditions", [])
        return any("ImagePullBackOff" in c["message"] and "job-rollout-0" in c["message"] for c in conditions)

    await until(reported, "the kubelet's words in a condition")


async def test_a_pod_of_someone_else_under_our_name_is_left_alone_and_told(jobs: Jobs, start, kubelet) -> None:
    theirs = {"metadata": {"name": "job-env-0"}, "spec": {"containers": [{"name": "c", "image": IMAGE}]}}
    uid = (await jobs.api.create(kinds.POD, jobs.namespace, theirs))["metadata"]["uid"]
    await start()
    await jobs.create()
    assert "Pod/job-env-0" in await jobs.wait_condition("Accepted", "False", "NameConflict")
    assert (await jobs.api.read(kinds.POD, jobs.namespace, "job-env-0"))["metadata"]["uid"] == uid
    await jobs.delete_pod("job-env-0", now=True)
    await jobs.wait_condition("Accepted", "True")
    await jobs.wait_pods(*STANDARD)


async def test_a_service_of_someone_else_under_our_name_is_left_alone_and_told(jobs: Jobs, start) -> None:
    theirs = {"metadata": {"name": "job"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}}
    await jobs.api.create(kinds.SERVICE, jobs.namespace, theirs)
    await start()
    await jobs.create()
    assert "Service/job" in await jobs.wait_condition("Accepted", "False", "NameConflict")
    kept = await jobs.api.read(kinds.SERVICE, jobs.namespace, "job")
    assert kept["spec"]["selector"] == {"app": "theirs"} and not kept["metadata"].get("labels")


async def test_a_missing_volume_claim_is_named_and_found_when_it_comes(jobs: Jobs, start, kubelet) -> None:
    volumes = {
        "volumes": [{"name": "m", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "m", "mountPath": "/models"}],
    }
    await start()
    await jobs.create(actor=volumes)
    assert '"models"' in await jobs.wait_condition("Accepted", "False", "VolumeClaimNotFound")
    assert await jobs.pods() == {}
    claim = {
        "metadata": {"name": "models"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await jobs.api.create(kinds.CLAIM, jobs.namespace, claim)
    await jobs.wait_condition("Accepted", "True")


async def test_a_selector_that_nothing_matches_is_told_in_the_schedulers_words(jobs: Jobs, start, kubelet) -> None:
    await start()
    await jobs.create(rollout={"nodeSelector": {"no": "such-node"}})

    async def reported() -> bool:
        """Of a new node the scheduler may first say that it is not ready."""
        status, reason, message = await jobs.condition("Scheduled")
        words = "didn't match Pod's node affinity/selector"
        return (status, reason) == ("False", "Unschedulable") and words in message and "job-rollout-0" in message

    await until(reported, "the scheduler's words about job-rollout-0")


async def test_a_secret_deleted_by_hand_comes_back_byte_equal(jobs: Jobs, start, kubelet) -> None:
    await start(resync_seconds=1.0)
    uid = (await jobs.create())["metadata"]["uid"]
    await jobs.wait_pods(*STANDARD)
    name = naming.secret("job", uid)
    before = await jobs.api.read(kinds.SECRET, jobs.namespace, name)
    await jobs.api.delete(kinds.SECRET, jobs.namespace, name, uid=before["metadata"]["uid"])

    async def back() -> bool:
        return any(o["metadata"]["name"] == name for o in await jobs.list(kinds.SECRET))

    await until(back, "the Secret")
    assert (await jobs.api.read(kinds.SECRET, jobs.namespace, name))["data"] == before["data"]


@pytest.mark.parametrize("kind", [kinds.SERVICE, kinds.CONFIG_MAP], ids=lambda kind: kind.plural)
async def test_a_supporting_object_deleted_by_hand_comes_back(jobs: Jobs, start, kubelet, kind: Kind) -> None:
    await start()
    await jobs.create()
    await jobs.wait_pods(*STANDARD)
    name = "job" if kind == kinds.SERVICE else "job-config"
    before = await jobs.api.read(kind, jobs.namespace, name)
    await jobs.api.delete(kind, jobs.namespace, name, uid=before["metadata"]["uid"])

    async def back() -> bool:
        return any(o["metadata"]["name"] == name for o in await jobs.list(kind))

    await until(back, f"{kind.kind} {name}")


async def test_a_status_of_another_operator_version_is_read_over(jobs: Jobs, start, kubelet) -> None:
    await jobs.create()
    strange = {
        "phase": "Running",
        "epoch": 7,
        "step": 3,
        "conditions": [],
        "inventedLater": {"deep": [1, {"x": None}]},
        "roles": [],
    }
    await jobs.api.patch(kinds.RLJOB, jobs.namespace, "job", {"status": strange}, subresource="status")
    key = {"metadata": {"name": master_key.NAME}, "data": {"master": base64.b64encode(bytes(32)).decode()}}
    await jobs.api.create(kinds.SECRET, home_of(jobs.namespace), key)  # that operator's: a started job has keys of it
    replica = await start()
    pods = await jobs.wait_pods(*STANDARD)
    epochs = {int(pod["metadata"]["labels"][naming.LABEL_EPOCH]) for pod in pods.values()}
    status = (await jobs.get())["status"]
    assert epochs == {status["epoch"]} and status["epoch"] >= 7, "an epoch never falls"
    assert len(status["conditions"]) == 9
    assert replica.operator.metrics.registry.get_sample_value("rljob_operator_queue_retries_total") == 0


async def test_jobs_of_another_manager_are_not_touched(jobs: Jobs, start) -> None:
    replica = await start()

    async def leads() -> bool:
        try:
            return bool(await jobs.api.read(kinds.SECRET, home_of(jobs.namespace), master_key.NAME))
        except NotFound:
            return False

    await until(leads, "the master key, which the leader makes")
    await replica.settle()
    before = replica.writes()
    await jobs.create(managedBy="someone.else/controller")

    async def seen() -> bool:
        return bool(list(replica.operator.cache.jobs()))

    await until(seen, "the operator to have seen the job")
    await replica.settle()
    assert replica.writes() == before
    assert "status" not in await jobs.get()
