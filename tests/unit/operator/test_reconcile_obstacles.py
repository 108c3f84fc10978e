"""What stands in the way of a job: a spec not understood, names taken, missing claims and images, quotas, the scheduler."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rl_core.api.status import RLJobStatus
from rljob_operator.model import Observed, OperatorConfig
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.reconcile.conditions import TYPES
from tests.unit.operator.simulator import CONFIG, START, World, make_job, reason, running

CLAIMED = {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"actor": {"replicas": "two"}}, "spec.actor.replicas"),
        ({"nonsense": 1}, "spec.nonsense"),
        ({"rollout": {"replicas": 1, "minReplicas": 3}}, "minReplicas must not exceed replicas 1, got 3"),
        (
            {"actor": {"gpus": 3, "processesPerPod": 2}, "algorithm": {"promptsPerStep": 32}},
            "multiple of processesPerPod 2, got 3",
        ),
        (
            {"placement": {"mode": "hybrid"}, "rollout": {"gpus": 1}},
            "rollout.gpus must equal actor.gpus with placement.mode hybrid, which puts both on the same devices, got 1 beside 0",
        ),
        (
            {"placement": {"componentPlacement": {"actor": 0, "rollout": "1-4"}}},
            r"placement.componentPlacement: component rollout: part '1-4': rank 4 is out of range",
        ),
    ],
    ids=["type", "unknown", "rule", "plan", "mode", "placement"],
)
def test_a_spec_that_is_not_understood_is_told_and_makes_no_pods(spec: dict[str, Any], words: str) -> None:
    world = World(make_job(**spec))
    plan = world.reconcile()
    assert not plan.create and world.phase == "Pending"
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec") and words in accepted["message"]
    RLJobStatus.model_validate(world.status)
    assert [c["type"] for c in world.status["conditions"]] == list(TYPES)
    assert [event.reason for event in plan.events] == ["InvalidSpec"]
    assert world.reconcile().status is None and not world.plan().events


def test_no_job_beside_the_master_key_is_served() -> None:
    job = make_job()
    config = OperatorConfig(images=CONFIG.images, namespace=job["metadata"]["namespace"])
    plan = reconcile(job, Observed(), START, config=config)
    (accepted,) = (c for c in plan.status["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NamespaceNotServed")
    assert config.namespace in accepted["message"] and not (plan.create or plan.ensure or plan.ensure_secret)


def test_a_refusal_that_quotes_thousands_of_ranks_fits_into_the_status() -> None:
    placed = {"componentPlacement": {"actor": "0-4095", "rollout": "0-4095"}}
    blocks = {"actor": {"replicas": 64, "processesPerPod": 64}, "algorithm": {"promptsPerStep": 4096}}
    world = World(make_job(placement=placed, **blocks, rollout={"replicas": 1024}, env={"replicas": 1}))
    world.reconcile()
    message = world.condition("Accepted")["message"]
    assert message.startswith("placement.componentPlacement: mode must be colocated for these sets, got disaggregated")
    assert len(message) <= 2000


def test_a_running_job_whose_spec_is_no_longer_understood_keeps_its_pods() -> None:
    world = running()
    names = sorted(world.pods)
    world.edit(nonsense=1)
    world.settle(ticks=10)
    assert sorted(world.pods) == names and reason(world, "Accepted") == "InvalidSpec" and world.phase == "Running"


def test_an_object_of_someone_else_under_our_name_is_a_conflict() -> None:
    world = World(make_job())
    observed = Observed(name_conflicts=("Service/x",))
    plan = reconcile(world.job, observed, START, config=CONFIG)
    world.apply(plan)
    assert not plan.create and not plan.ensure and plan.requeue_after == 15.0
    assert reason(world, "Accepted") == "NameConflict" and "Service/x" in world.condition("Accepted")["message"]


def test_a_pod_with_our_labels_and_no_owner_is_a_conflict() -> None:
    world = World(make_job())
    stranger = {"metadata": {"name": "x-env-0", "uid": "s", "labels": {"rljob.dev/role": "env", "rljob.dev/job": "x"}}}
    plan = reconcile(world.job, pod_views.observe(pods=[stranger]), START, config=CONFIG)
    world.apply(plan)
    assert not plan.create and reason(world, "Accepted") == "NameConflict"


def test_pods_of_an_earlier_job_of_the_name_are_waited_for() -> None:
    old = running()
    new = World(make_job(uid="bbbbbbbb-1111"))
    plan = reconcile(new.job, pod_views.observe(pods=list(old.pods.values())), START, config=CONFIG)
    new.apply(plan)
    assert not plan.create and not plan.delete and not plan.ensure and plan.requeue_after == 2.0
    assert (
        reason(new, "Scheduled") == "PreviousJobTerminating"
        and new.status["columns"]["reason"] == "PreviousJobTerminating"
    )
    assert new.reconcile().create, "as soon as they are gone"


def test_a_missing_claim_is_named_before_any_pod_is_made() -> None:
    world = World(make_job(actor=CLAIMED))
    plan = world.reconcile()
    assert not plan.create and plan.requeue_after == 15.0
    assert reason(world, "Accepted") == "VolumeClaimNotFound" and '"shared"' in world.condition("Accepted")["message"]
    world.claims = {"shared": {"spec": {"accessModes": ["ReadWriteOnce"]}}}
    assert world.reconcile().create


@pytest.mark.parametrize(
    ("modes", "replicas", "extra", "accepted"),
    [
        (["ReadWriteOnce"], 1, {}, True),
        (["ReadWriteOnce"], 2, {}, False),
        (["ReadWriteOncePod"], 2, {"nodeSelector": {"kubernetes.io/hostname": "n1"}}, False),
        (["ReadWriteOnce"], 2, {"nodeSelector": {"kubernetes.io/hostname": "n1"}}, True),
        (["ReadWriteMany"], 2, {}, True),
        (["ReadWriteOnce", "ReadWriteMany"], 2, {}, True),
        (["ReadOnlyMany"], 2, {}, False),
    ],
)
def test_several_pods_need_a_claim_that_several_nodes_may_mount(
    modes: list[str], replicas: int, extra: dict[str, Any], accepted: bool
) -> None:
    world = World(make_job(actor={**CLAIMED, **extra, "replicas": replicas}))
    world.claims = {"shared": {"spec": {"accessModes": modes}}}
    plan = world.reconcile()
    assert bool(plan.create) is accepted
    assert reason(world, "Accepted") == ("SpecAccepted" if accepted else "VolumeNotShared")


def test_an_image_that_nobody_names_is_told() -> None:
    plan = reconcile(make_job(), Observed(), START, config=OperatorConfig())
    assert plan.status is not None and not plan.create
    assert (
        plan.status["conditions"][0]["reason"] == "ImageMissing"
        and "actor.image" in plan.status["conditions"][0]["message"]
    )


def test_checkpoints_that_do_not_outlive_the_pod_are_told_once() -> None:
    world = World(make_job())
    assert [event.reason for event in world.reconcile().events] == ["CheckpointsNotDurable"]
    assert "checkpoints are not durable" in world.condition("Accepted")["message"]
    kept = World(make_job(actor=CLAIMED, checkpoint={"path": "/data/checkpoints"}), claims={"shared": {"spec": {}}})
    assert not kept.reconcile().events and not kept.condition("Accepted")["message"]


def test_a_quota_is_told_in_the_api_servers_words_and_lifted() -> None:
    world = World(make_job(), quota=2)
    world.reconcile()
    world.reconcile()
    assert (
        reason(world, "Scheduled") == "QuotaExceeded" and "exceeded quota: q" in world.condition("Scheduled")["message"]
    )
    assert world.status["columns"]["reason"] == "QuotaExceeded"
    world.quota = None
    world.run_until(lambda: world.phase == "Running")


def test_the_schedulers_words_are_told() -> None:
    world = World(make_job())
    world.reconcile()
    for pod in world.pods.values():
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
            }
        ]
    world.reconcile()
    scheduled = world.condition("Scheduled")
    assert scheduled["reason"] == "Unschedulable" and "2 Insufficient nvidia.com/gpu" in scheduled["message"]
    assert scheduled["message"].count("0/2 nodes") == 1, "said once for all pods"
    assert world.status["columns"]["reason"] == "Unschedulable" and world.phase == "Pending"


def test_an_image_that_cannot_be_pulled_is_told_in_the_kubelets_words() -> None:
    world = World(make_job(), no_image=True)
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert (
        reason(world, "Ready") == "ImagePullError" and "Back-off pulling image" in world.condition("Ready")["message"]
    )
    assert world.status["columns"]["reason"] == "ImagePullError"


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"path": "/data/runs", "resumeFrom": {"job": "a"}}, None),
        ({"resumeFrom": {"path": "/data/runs/a-12345678"}}, None),
        ({"resumeFrom": {"job": "a"}}, "checkpoint.path must be below a volume mount of the actor"),
        (
            {"path": "/gone", "resumeFrom": {"job": "a"}},
            "checkpoint.path must be below .* got /gone and mounts /data;",
        ),
        ({"resumeFrom": {"path": "/data/../etc"}}, "resumeFrom.path must be below .* got /data/../etc"),
        ({"resumeFrom": {"path": "data/a"}}, "resumeFrom.path must be below .* got data/a"),
    ],
    ids=["job", "path", "no folder", "folder elsewhere", "dots", "relative"],
)
def test_a_checkpoint_to_begin_from_must_be_on_a_volume_of_the_actor(
    checkpoint: dict[str, Any], words: str | None
) -> None:
    world = World(make_job(actor=CLAIMED, checkpoint=checkpoint), claims={"shared": {}})
    plan = world.reconcile()
    accepted = world.condition("Accepted")
    if words is None:
        assert accepted["status"] == "True" and plan.create
    else:
        assert accepted["reason"] == "CheckpointNotMounted" and not plan.create
        assert re.search(words, accepted["message"])
