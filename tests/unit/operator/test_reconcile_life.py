"""A job's life besides faults: obstacles before the start, scaling, deadlines, the end, and what the status tells."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rl_core.api.status import RLJobStatus
from rljob_operator.model import Progress
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.reconcile.conditions import TYPES
from rljob_operator.reconcile.record import Suspension, suspension_status
from rljob_operator.times import to_text
from tests.unit.operator.simulator import CONFIG, START, World, make_job, reason, running

# --- from nothing ------------------------------------------------------------------------------------------------------


def test_the_first_reconcile_gives_phase_epoch_all_conditions_and_every_pod() -> None:
    world = World(make_job())
    plan = world.reconcile()
    assert plan.status is not None and plan.ensure_secret
    RLJobStatus.model_validate(plan.status)
    assert plan.status["phase"] == "Pending" and plan.status["epoch"] == 1
    assert [c["type"] for c in plan.status["conditions"]] == list(TYPES)
    assert [pod["metadata"]["name"] for pod in plan.create] == ["x-actor-0", "x-rollout-0", "x-rollout-1", "x-env-0"]
    assert ("Service", "x") in world.objects and ("ConfigMap", "x-config") in world.objects


def test_a_settled_job_is_written_no_more_and_asks_for_nothing() -> None:
    world = running()
    world.stall = {"reason": "WaitingForPods", "since": 400.0}  # holds the steps still
    world.reconcile()
    world.reconcile()
    world.now += 3600
    plan = world.plan()
    assert plan.status is None and not (plan.delete or plan.create or plan.ensure or plan.calls or plan.events)
    assert plan.requeue_after is None


def test_equal_inputs_give_equal_plans_and_leave_them_alone() -> None:
    world = running()
    job, observed = copy.deepcopy(world.job), world.observed()
    plans = [reconcile(job, observed, world.now, config=CONFIG) for _ in range(2)]
    assert plans[0] == plans[1] and job == world.job


def test_a_support_object_that_was_deleted_or_changed_is_written_again() -> None:
    world = running()
    del world.objects["Service", "x"]
    world.objects["ConfigMap", "x-config"]["metadata"]["annotations"]["rljob.dev/manifest-hash"] = "other"
    assert {obj["kind"] for obj in world.reconcile().ensure} == {"Service", "ConfigMap"}
    assert not world.reconcile().ensure


def test_a_template_that_drifts_replaces_no_pod() -> None:
    world = running()
    names = {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}
    world.edit(rollout={"image": "other:2"})
    world.settle(ticks=20)
    assert {name: pod["metadata"]["uid"] for name, pod in world.pods.items()} == names
    world.end_pod("x-rollout-0", 1)
    world.reconcile()
    world.run_until(lambda: world.role("rollout")["ready"] == 2)
    assert world.pods["x-rollout-0"]["spec"]["containers"][0]["image"] == "other:2"


def test_an_edited_device_class_gets_another_claim_template_and_the_old_one_goes() -> None:
    def templates() -> list[str]:
        return [name for kind, name in world.objects if kind == "ResourceClaimTemplate"]

    actor = {"gpus": 1, "gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
    world = running(actor=actor)
    (old,) = templates()
    world.edit(suspend=True)
    world.run_until(lambda: world.phase == "Suspended")
    world.edit(suspend=False, actor={"deviceClass": "other.example.com"})
    world.run_until(lambda: world.phase == "Running")
    world.go_on(ticks=3)
    (new,) = templates()
    claim = world.pods["x-actor-0"]["spec"]["resourceClaims"][0]
    assert new != old and claim["resourceClaimTemplateName"] == new


# --- scaling -----------------------------------------------------------------------------------------------------------


def test_scaling_up_adds_pods_and_restarts_nothing() -> None:
    world = running()
    before = {pod["metadata"]["uid"] for pod in world.pods.values()}
    world.edit(rollout={"replicas": 5})
    assert [pod["metadata"]["name"] for pod in world.reconcile().create] == [
        "x-rollout-2",
        "x-rollout-3",
        "x-rollout-4",
    ]
    world.run_until(lambda: world.role("rollout")["ready"] == 5)
    assert before <= {pod["metadata"]["uid"] for pod in world.pods.values()} and world.status["epoch"] == 1
    assert world.status["rollout"]["readyReplicas"] == 5


def test_scaling_down_drains_first_and_takes_the_highest_index() -> None:
    world = running(rollout={"replicas": 4, "minReplicas": 1})
    world.edit(rollout={"replicas": 2})
    plan = world.plan()
    assert not plan.delete
    drains = [call.body for call in plan.calls if call.method == "POST /drain"]
    assert drains == [{"pods": ["x-rollout-3", "x-rollout-2"]}]
    world.apply(plan)
    assert [entry["pod"] for entry in world.status["draining"]] == ["x-rollout-2", "x-rollout-3"]
    world.tick()
    assert [deletion.name for deletion in world.reconcile().delete] == ["x-rollout-2", "x-rollout-3"]
    world.settle(ticks=20)
    assert sorted(name for name in world.pods if "rollout" in name) == ["x-rollout-0", "x-rollout-1"]
    assert "draining" not in world.status and world.role("rollout")["restarts"] == 0


def test_a_pod_that_does_not_drain_goes_after_its_time() -> None:
    world = running(rollout={"replicas": 3, "minReplicas": 1}, runtime={"drainSeconds": 20})
    world.edit(rollout={"replicas": 2})
    world.apply(world.plan(), at_most=1)  # the call is lost
    for _ in range(29):
        world.tick()
        plan = world.plan()
        assert not plan.delete and plan.requeue_after is not None
    world.tick()
    assert [deletion.name for deletion in world.plan().delete] == ["x-rollout-2"]


def draining_world() -> World:
    """Return a world whose runner lets x-rollout-2 finish its work."""
    world = running(rollout={"replicas": 3, "minReplicas": 1}, runtime={"drainSeconds": 20})
    world.edit(rollout={"replicas": 2})
    world.reconcile()
    world.drained.clear()  # it was asked, and works on
    return world


def deleted_after(world: World) -> float:
    """Return the seconds until the operator deletes a pod."""
    began = world.now
    while not world.reconcile().delete:
        world.tick()
        assert world.now - began < 100
    return world.now - began


def test_a_poll_that_failed_is_no_word_about_draining_pods() -> None:
    world = draining_world()
    world.silent_since = world.now
    assert deleted_after(world) == 30


def test_a_new_leader_that_has_not_asked_yet_deletes_no_draining_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    world = draining_world()
    monkeypatch.setattr(World, "progress", lambda self: None)
    assert deleted_after(world) == 30


def test_a_runner_that_does_not_list_a_pod_has_not_drained_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = draining_world()
    answer = World.progress

    def without_members(self: World) -> Any:
        progress = answer(self)
        return replace(progress, status={**progress.status, "members": []}) if progress is not None else None

    monkeypatch.setattr(World, "progress", without_members)
    assert deleted_after(world) == 30


def test_what_the_runner_said_before_it_was_asked_to_drain_is_of_another_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(rollout={"replicas": 3, "minReplicas": 1}, runtime={"drainSeconds": 20})
    world.drained = {"x-rollout-2"}
    stale = world.progress()
    assert stale is not None
    world.tick(3)
    monkeypatch.setattr(World, "progress", lambda self: stale)
    world.edit(rollout={"replicas": 2})
    assert deleted_after(world) == 30


def test_a_surplus_pod_that_never_started_goes_at_once() -> None:
    world = running(rollout={"replicas": 2, "minReplicas": 1})
    world.no_image = True
    world.edit(rollout={"replicas": 3})
    world.go_on(ticks=3)
    world.edit(rollout={"replicas": 2})
    assert [deletion.name for deletion in world.reconcile().delete] == ["x-rollout-2"]


def test_a_changed_spec_that_the_runner_refuses_is_a_condition_until_it_is_applied_or_changed_again() -> None:
    world = running()
    world.edit(algorithm={"steps": 1})
    world.refused_change = (world.job["metadata"]["generation"], "HTTP 400: steps must be above 7")
    applied, world.applied = world.applied, 0
    world.reconcile()
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ChangeRefused")
    assert "steps must be above 7" in degraded["message"]
    world.edit(algorithm={"steps": 700})
    world.applied = applied
    world.reconcile()
    assert reason(world, "Degraded") == "AllRolesReady"


def test_a_changed_spec_is_told_to_the_runner_until_it_is_applied() -> None:
    world = running()
    world.reconcile()
    assert not world.plan().calls
    world.edit(algorithm={"steps": 700})
    calls = world.plan().calls
    assert [(call.method, call.body["generation"], call.ip) for call in calls] == [("PUT /control", 2, "10.0.0.1")]
    assert calls[0].body["spec"]["algorithm"]["steps"] == 700
    world.reconcile()
    world.reconcile()
    assert world.status["appliedGeneration"] == 2 and not world.plan().calls


# --- deadlines and the end ---------------------------------------------------------------------------------------------


def test_a_job_that_takes_too_long_fails_and_stops() -> None:
    world = running(activeDeadlineSeconds=100, deletionPolicy={"onFailure": "DeletePods"})
    assert world.plan().requeue_after is not None
    world.settle(ticks=300)
    assert world.phase == "Failed" and reason(world, "Failed") == "DeadlineExceeded"
    assert "activeDeadlineSeconds 100" in world.condition("Failed")["message"]
    assert not world.pods and 100 <= world.status["runtimeSeconds"] < 110


def test_a_first_step_that_comes_too_late_fails_the_job() -> None:
    world = World(make_job(startDeadlineSeconds=30), no_image=True)
    world.settle(ticks=100)
    assert world.phase == "Failed" and "startDeadlineSeconds 30" in world.condition("Failed")["message"]


def test_the_start_deadline_is_met_for_good_with_the_first_step() -> None:
    world = running(startDeadlineSeconds=30)
    world.settle(ticks=60)
    assert world.phase == "Running"
    world.saved = 0
    world.end_pod("x-actor-0", 3)
    world.run_until(lambda: world.status["epoch"] == 2)
    world.no_image = True
    world.settle(ticks=60)
    assert world.phase != "Failed"


def test_success_tells_the_last_step_even_when_no_poll_saw_it() -> None:
    world = running(algorithm={"steps": 8})
    step = world.status["step"]
    while world.steps < 8:
        world.tick()
    world.reconcile()
    assert step < 8 and world.phase == "Succeeded" and world.status["step"] == 8 and world.status["reward"] == 0.08
    assert world.condition("Complete")["status"] == "True" and world.status["columns"]["step"] == "8/8"
    assert "completionTime" in world.status


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("DeletePods", set()),
        ("KeepActor", {"x-actor-0"}),
        ("KeepAll", {"x-actor-0", "x-rollout-0", "x-rollout-1", "x-env-0"}),
    ],
)
def test_the_deletion_policy_says_which_pods_stay(policy: str, left: set[str]) -> None:
    world = World(make_job(algorithm={"steps": 8}, deletionPolicy={"onSuccess": policy}))
    world.settle()
    assert world.phase == "Succeeded" and set(world.pods) == left


def test_a_failed_job_keeps_what_ended_and_stops_its_actor() -> None:
    world = running(actor={"replicas": 2}, algorithm={"steps": 500, "promptsPerStep": 12})
    world.end_pod("x-rollout-1", 2)
    world.settle(ticks=30)
    assert world.phase == "Failed"
    assert {"reason": "failed"} in [call.body for call in world.calls if call.method == "POST /finish"]
    world.go_on(ticks=150)
    assert set(world.pods) == {"x-actor-0", "x-rollout-1"}, (
        "the actor pod that did not end by itself went after its time"
    )


def test_an_ended_job_is_deleted_when_its_time_is_up() -> None:
    world = World(make_job(algorithm={"steps": 8}, ttlSecondsAfterFinished=60))
    world.run_until(lambda: world.phase == "Succeeded")
    assert 0 < (world.plan().requeue_after or 0) <= 60
    world.go_on(ticks=70)
    assert world.deleted_job


def test_the_ttl_runs_for_an_ended_job_whose_spec_is_no_longer_understood() -> None:
    world = World(make_job(algorithm={"steps": 8}, ttlSecondsAfterFinished=60))
    world.run_until(lambda: world.phase == "Succeeded")
    world.edit(nonsense=1)
    left = world.reconcile().requeue_after
    assert left is not None and 0 < left <= 60 and not world.deleted_job
    world.tick(left)
    world.reconcile()
    assert world.deleted_job


def test_an_ended_job_stays_ended_whatever_is_edited() -> None:
    world = World(make_job(algorithm={"steps": 8}))
    world.settle()
    before = world.status
    world.edit(suspend=True, rollout={"replicas": 5})
    world.settle(ticks=20)
    assert world.phase == "Succeeded" and world.status["conditions"] == before["conditions"] and len(world.created) == 4


# --- what the status tells of the runner -------------------------------------------------------------------------------


def test_progress_alone_may_wait_and_changes_of_state_may_not() -> None:
    world = running()
    world.go_on(ticks=2)
    assert world.plan().progress_only
    world.end_pod("x-rollout-0", 1)
    assert not world.plan().progress_only


def test_answers_out_of_order_never_let_a_step_fall() -> None:
    world = running()
    seen = world.status["step"]
    world.steps -= 3
    world.reconcile()
    assert world.status["step"] == seen


def test_the_word_of_another_pod_or_epoch_is_not_heard() -> None:
    world = running()
    uid = world.pods["x-actor-0"]["metadata"]["uid"]
    for progress in (
        Progress(status={**world.summary(), "step": 400}, at=world.now, pod_uid="another"),
        Progress(status={**world.summary(), "step": 400, "epoch": 7}, at=world.now, pod_uid=uid),
    ):
        observed = pod_views.observe(
            pods=list(world.pods.values()), objects=list(world.objects.values()), progress=progress
        )
        plan = reconcile(world.job, observed, world.now, config=CONFIG)
        assert (plan.status or world.status)["step"] < 400


def test_a_silent_runner_is_told_once_and_is_no_failure() -> None:
    world = running()
    world.silent_since = world.now
    world.tick(10)
    plan = world.reconcile()
    assert world.condition("Progressing")["reason"] != "RunnerUnreachable" and plan.requeue_after is not None
    world.tick(6)
    world.reconcile()
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("Unknown", "RunnerUnreachable")
    world.steps = world.status["step"]
    for _ in range(20):
        world.now += 5
        assert world.plan().status is None
    assert world.phase == "Running" and world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(
    "reported",
    [
        {"checkpoint": {"lastStep": 50, "time": "2025-06-15T15:00:00." + "0" * 5000 + "Z"}},
        {"metrics": {"train/loss": 10**400, "reward/mean": -(10**400)}},
        {"workload": {"starved": 10**400}, "reward": 10**400, "step": 10**400},
    ],
    ids=["time", "metric", "share"],
)
def test_a_status_that_the_runner_makes_up_does_not_keep_the_plan_from_being_made_or_written(
    reported: dict[str, Any],
) -> None:
    world = running()
    uid = world.pods["x-actor-0"]["metadata"]["uid"]
    progress = Progress(status={**world.summary(), **reported}, at=world.now, pod_uid=uid)
    observed = pod_views.observe(
        pods=list(world.pods.values()), objects=list(world.objects.values()), progress=progress
    )
    plan = reconcile(world.job, observed, world.now, config=CONFIG)
    assert plan.status is not None
    RLJobStatus.model_validate(plan.status)
    assert all(len(str(value)) < 100 for value in plan.status.get("checkpoint", {}).values())


def test_a_message_of_a_rule_that_is_too_long_for_the_status_is_cut() -> None:
    status = suspension_status(Suspension(rule="KlBlowUp", since=0.0, message="x" * 10_000))
    assert len(status["message"]) == 4096


def test_devices_metrics_and_versions_are_told() -> None:
    world = running()
    uid, pods = world.pods["x-actor-0"]["metadata"]["uid"], list(world.pods.values())
    metrics = {"train/loss": float("nan"), "reward/mean": 0.25, "time/step": "x", "env/steps_total": 7.0}
    status = {
        **world.summary(),
        "step": 50,
        "metrics": metrics | {"env/success_once": 0.75},
        "checkpoint": {
            "lastStep": 50,
            "path": "/c/50",
            "time": "2025-06-15T15:00:00Z",
            "bestStep": 40,
            "bestReward": 0.5,
        },
        "roles": [{"name": "rollout", "ready": 2, "lag": 3, "versions": {"47": 1, "50": 1}}],
        "workload": {
            "starved": 0.25,
            "rollouts": [*[{"name": "rollout:0", "busy": 0.756}] * 2, {"busy": "x"}, 3, {"busy": 7}],
        },
        "members": [{"pod": "x-actor-0", "deviceUuids": ["GPU-2"]}, {"pod": "x-actor-0", "deviceUuids": ["GPU-1"]}],
    }
    plan = reconcile(
        world.job,
        pod_views.observe(
            pods=pods, objects=list(world.objects.values()), progress=Progress(status=status, at=world.now, pod_uid=uid)
        ),
        world.now,
        config=CONFIG,
    )
    assert plan.status is not None
    RLJobStatus.model_validate(plan.status)
    shown = [
        {"name": "reward/mean", "value": "0.25"},
        {"name": "env/success_once", "value": "0.75"},
        {"name": "train/loss", "value": "nan"},
        {"name": "rollout/starved_share", "value": "0.25"},
    ]
    assert plan.status["busy"] == [{"name": "rollout:0", "value": "0.76"}]
    assert plan.status["columns"]["success"] == "0.75" and "success" not in world.status["columns"]
    assert plan.status["metrics"] == shown, "a dozen that tell whether it is well, numbers only"
    assert plan.status["devices"] == [
        {"pod": "x-actor-0", "node": world.pods["x-actor-0"]["spec"]["nodeName"], "uuids": ["GPU-1", "GPU-2"]}
    ]
    assert plan.status["lag"] == 3 and plan.status["checkpoint"]["bestReward"] == 0.5
    rollout = plan.status["roles"][1]
    assert (rollout["minVersion"], rollout["maxVersion"]) == (47, 50)
    in_sync = next(c for c in plan.status["conditions"] if c["type"] == "WeightsInSync")
    assert (in_sync["status"], in_sync["reason"]) == ("False", "RolloutsBehind")


def test_a_pod_that_was_asked_to_finish_goes_even_if_it_is_wanted_again() -> None:
    world = running(rollout={"replicas": 3, "minReplicas": 1})
    uid = world.pods["x-rollout-2"]["metadata"]["uid"]
    world.edit(rollout={"replicas": 2})
    world.reconcile()
    world.edit(rollout={"replicas": 3})
    world.run_until(lambda: world.pods.get("x-rollout-2", {"metadata": {"uid": uid}})["metadata"]["uid"] != uid)
    world.go_on(ticks=8)
    assert world.role("rollout")["ready"] == 3
    assert "draining" not in world.status and world.role("rollout")["failed"] == 0
    assert not [event for event in world.events if event.reason == "PodReplaced"]


def test_an_init_container_that_runs_is_named() -> None:
    job = make_job()
    first = reconcile(job, pod_views.observe(), START, config=CONFIG)
    prepares = {"initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}], "phase": "Pending"}
    pods = [
        {
            **pod,
            "metadata": {**pod["metadata"], "uid": f"u{number}", "creationTimestamp": to_text(START)},
            "spec": {**pod["spec"], "nodeName": "n"},
            "status": prepares if pod["metadata"]["name"].endswith("-actor-0") else {"phase": "Running"},
        }
        for number, pod in enumerate(first.create)
    ]
    plan = reconcile({**job, "status": first.status}, pod_views.observe(pods=pods), START + 1, config=CONFIG)
    ready = next(c for c in plan.status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "Preparing" and "init container fetch is running" in ready["message"]
    assert plan.status["columns"]["reason"] == "Preparing"


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = running()
    world.job["metadata"]["deletionTimestamp"] = to_text(world.now)
    world.pods.clear()
    plan = world.plan()
    assert plan.status is None and not plan.create and not plan.delete


def test_one_lost_poll_is_no_silence() -> None:
    world = running()
    world.reconcile()
    progress = world.progress()
    assert progress is not None
    since = world.now
    for failures, told in ((1, "StepFinished"), (2, "RunnerUnreachable")):
        lost = replace(progress, error="timed out", failing_since=since, failures=failures)
        observed = replace(world.observed(), progress=lost)
        plan = reconcile(world.job, observed, since + 60, config=CONFIG)
        status = plan.status or world.status
        assert next(c["reason"] for c in status["conditions"] if c["type"] == "Progressing") == told
