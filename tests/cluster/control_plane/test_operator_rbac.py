"""The chart's rights are those the operator uses: it runs as the chart's account, lacks none and leaves none unused."""

from pathlib import Path

from rljob_operator import kinds
from rljob_operator.manifests import gang
from tests.cluster.operator_rig.jobs import IMAGE, STANDARD, Jobs, until
from tests.cluster.operator_rig.kubelet import Kubelet
from tests.cluster.operator_rig.replica import home_of
from tests.cluster.operator_rig.runner import FakeRunner
from tests.cluster.operator_rig.witness import Right, Witness, granted
from tests.cluster.testcluster.access import Access

NOT_EXERCISED: dict[Right, str] = {
    (
        "update",
        "rljob.dev",
        "rljobs/finalizers",
    ): "asked for by OwnerReferencesPermissionEnforcement alone, which this API server does not run",
    (
        "delete",
        "resource.k8s.io",
        "resourceclaimtemplates",
    ): "after an edit of deviceClass or gpus of a suspended job; tests/unit/operator/test_reconcile_life.py holds that it is used",
    **dict.fromkeys(
        {(verb, kind.group, kind.plural) for verb in ("get", "watch", "create", "patch") for kind in gang.KINDS},
        "no API for gangs is served here; test_gang.py and test_gang_crds.py hold that these are used",
    ),
}
AT_TIMES: dict[Right, str] = {
    (
        "patch",
        "",
        "events",
    ): "counts an event up that comes again: whether a pod is seen going, or only gone, is a matter of time",
}


async def exercise(jobs: Jobs, kubelet: Kubelet, runner: FakeRunner) -> None:
    """Have the operator do everything it can do."""
    claim = {
        "metadata": {"name": "models"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await jobs.api.create(kinds.CLAIM, jobs.namespace, claim)
    volumes = {
        "volumes": [{"name": "m", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "m", "mountPath": "/models"}],
    }
    theirs = {"metadata": {"name": "job-env-0"}, "spec": {"containers": [{"name": "c", "image": IMAGE}]}}
    await jobs.api.create(kinds.POD, jobs.namespace, theirs)
    await jobs.create(actor=volumes, rollout={"gpus": 1, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"})
    await jobs.wait_condition("Accepted", "False", "NameConflict")
    await jobs.delete_pod("job-env-0", now=True)
    await jobs.wait_pods(*STANDARD)
    await jobs.change({"rollout": {"replicas": 1}})
    await jobs.wait_pods("job-actor-0", "job-rollout-0", "job-env-0")
    for _ in range(3):  # the same event again is counted up by a patch
        uid = await jobs.delete_pod("job-env-0")

        async def replaced(uid: str = uid) -> bool:
            pods = await jobs.pods()
            return "job-env-0" in pods and pods["job-env-0"]["metadata"]["uid"] != uid

        await until(replaced, "a new job-env-0")
    await jobs.change({"ttlSecondsAfterFinished": 1})
    await kubelet.end("job-actor-0", code=0)
    await jobs.wait_gone(kinds.RLJOB, "job")
    runner.status["workload"] = {"full": True, "seconds": 60, "starved": 0.9, "actorStarved": 0.0, "rollouts": [{}, {}]}
    await jobs.create("scaled", rollout={"autoscale": {"max": 2}})

    async def scaled() -> bool:
        return (await jobs.get("scaled"))["spec"]["rollout"]["replicas"] == 1

    await until(scaled, "one rollout wanted by rollout.autoscale")


async def test_the_charts_rights_are_sufficient_and_each_is_used(
    jobs: Jobs, start, kubelet: Kubelet, rights: list[dict], account: Path
) -> None:
    witness = Witness()
    async with FakeRunner(jobs, address=kubelet.address("scaled-actor-0"), step=1, appliedGeneration=99) as runner:
        replica = await start(kubeconfig=account, wrap=witness.wrap)
        await exercise(jobs, kubelet, runner)
        await replica.settle()
        await replica.stop()  # which gives the Lease back: it may be updated
    assert witness.refused == []
    watched = {("watch", kind.group, kind.plural) for kind in kinds.WATCHED}
    assert replica.watch_events("pods") > 4, "the watches run with these rights too"
    used = witness.used | watched
    assert used - granted(rights) == set(), "missing in the chart"
    assert granted(rights) - used - AT_TIMES.keys() == set(NOT_EXERCISED), "given by the chart and not used"


async def test_the_account_can_read_no_secret_but_its_own(
    control_plane: Access, jobs: Jobs, rights: list[dict]
) -> None:
    account = control_plane.kubeconfig_of("rljob-operator", namespace=home_of(jobs.namespace))

    def may(*words: str, namespace: str = jobs.namespace) -> bool:
        asking = ("--kubeconfig", account, "auth", "can-i", *words, "-n", namespace)
        return control_plane.kubectl(*asking, check=False).stdout.strip() == "yes"

    assert may("get", "secrets/rljob-operator-master-key", namespace=home_of(jobs.namespace))
    assert not may("get", "secrets/rljob-operator-master-key")
    for words in (
        ("get", "secrets/other"),
        ("list", "secrets"),
        ("watch", "secrets"),
        ("delete", "secrets"),
        ("create", "pods", "--subresource=exec"),
        ("get", "pods", "--subresource=log"),
    ):
        assert not may(*words), words
