"""What the operator does when something dies: which pods are replaced, and the default failure rules."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rljob_operator.times import to_seconds, to_text
from tests.unit.operator.simulator import START, World, make_job, uid_of


def running(**spec: Any) -> World:
    """Return a world whose job trains."""
    world = World(make_job(**{"algorithm": {"steps": 500}, **spec}))
    world.run_until(lambda: world.phase == "Running" and world.status.get("step", 0) >= 6 and all_there(world))
    return world


def all_there(world: World) -> bool:
    return all(role["ready"] == role["desired"] for role in world.status["roles"])


def uids(world: World, role: str) -> set[str]:
    return {p["metadata"]["uid"] for p in world.pods.values() if p["metadata"]["labels"]["rljob.dev/role"] == role}


def attempt_of(world: World, name: str) -> int:
    pod = world.pods[name]
    text = next(e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == "RLJOB_POD_PLAN")
    plan = json.loads(text)
    return int(plan["containers"][0]["processes"][0]["env"]["RLJOB_INCARNATION"].split(".")[0])


# --- what dies, what happens --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["rollout", "env"])
@pytest.mark.parametrize("code", [1, 3, 137, 143])
def test_a_dead_rollout_or_env_is_replaced_and_nothing_else_restarts(role: str, code: int) -> None:
    world = running()
    before = {r: uids(world, r) for r in ("actor", "rollout", "env")}
    world.end_pod(f"x-{role}-0", code)
    world.reconcile()
    assert world.condition("Degraded")["status"] == "True" and world.condition("Failed")["status"] == "False"
    assert f"ended with code {code}" in json.dumps([event.message for event in world.events])
    world.run_until(lambda: all_there(world) and uids(world, role) != before[role])
    assert uids(world, "actor") == before["actor"] and world.phase == "Running"
    assert world.status["epoch"] == 1 and world.status["restarts"] == 0
    assert world.role(role)["restarts"] == 1 and world.role(role)["failed"] == 1
    assert attempt_of(world, f"x-{role}-0") == 1, "a replacement has a higher incarnation"


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("code", [1, 3, 137, 139])
def test_a_dead_actor_rank_restarts_the_whole_gang_under_a_new_epoch(replicas: int, code: int) -> None:
    world = running(actor={"replicas": replicas}, algorithm={"steps": 500, "promptsPerStep": 12})
    actors, rollouts = uids(world, "actor"), uids(world, "rollout")
    world.end_pod(f"x-actor-{replicas - 1}", code)
    plan = world.reconcile()
    assert plan.status is not None and plan.status["epoch"] == 2 and plan.status["phase"] == "Restarting"
    assert not plan.delete and not plan.create, "the epoch is written before anything is done about it"
    world.run_until(lambda: world.phase == "Running" and all_there(world))
    assert not actors & uids(world, "actor") and uids(world, "rollout") == rollouts
    assert world.status["restarts"] == 1 and world.status["totalRestarts"] == 1
    assert {
        p["metadata"]["labels"]["rljob.dev/epoch"] for p in world.pods.values() if "actor" in p["metadata"]["name"]
    } == {"2"}


def test_training_goes_on_and_nothing_is_made_twice_without_an_operator() -> None:
    world = running()
    names, step = sorted(world.pods), world.steps
    for _ in range(60):
        world.tick()
    assert world.steps > step
    world.reconcile()
    assert sorted(world.pods) == names and len(world.created) == len(names)


def test_pods_of_a_dead_node_are_replaced_without_counting() -> None:
    world = running(actor={"replicas": 2}, algorithm={"steps": 500, "promptsPerStep": 12})
    node = world.pods["x-actor-1"]["spec"]["nodeName"]
    world.kill_node(node)
    world.run_until(lambda: world.status["epoch"] == 2)
    killed = world.now
    world.run_until(lambda: world.phase == "Running" and all_there(world))
    assert world.now - killed < 60, "bounded: grace, 15 s, and the start"
    assert world.status["restarts"] == 0 and world.status["totalRestarts"] == 1
    assert "DeletionByTaintManager" in world.condition("Failed")["message"]


def test_a_pod_that_its_node_may_still_end_is_never_deleted_by_force() -> None:
    world = running()
    world.pods["x-rollout-0"]["metadata"]["deletionTimestamp"] = to_text(world.now - 3600)
    plan = world.reconcile()
    assert not [deletion for deletion in plan.delete if deletion.grace_seconds == 0]


def test_a_pod_on_a_dead_node_keeps_its_name_until_15_s_after_its_deadline() -> None:
    world = running()
    node = world.pods["x-rollout-0"]["spec"]["nodeName"]
    world.kill_node(node)
    world.tick(1)
    deadline = to_seconds(world.pods["x-rollout-0"]["metadata"]["deletionTimestamp"])
    assert deadline is not None
    world.now = deadline + 14.0
    plan = world.reconcile()
    assert plan.requeue_after is not None and plan.requeue_after <= 1.0
    assert "x-rollout-0" in world.pods
    world.now = deadline + 15.0
    forced = [d for d in world.reconcile().delete if d.name == "x-rollout-0"]
    assert [d.grace_seconds for d in forced] == [0]


def test_an_earlier_jobs_pod_on_a_dead_node_does_not_hold_its_name_for_ever() -> None:
    earlier = running()
    earlier.kill_node(earlier.pods["x-rollout-0"]["spec"]["nodeName"])
    earlier.tick(1)
    left = earlier.pods["x-rollout-0"]
    world = World(make_job("another-uid"), now=earlier.now, pods={"x-rollout-0": left})
    assert not world.reconcile().create, "it waits for the name"
    deadline = to_seconds(left["metadata"]["deletionTimestamp"])
    assert deadline is not None
    world.now = deadline + 14.0
    assert not [d for d in world.reconcile().delete if d.name == "x-rollout-0"]
    world.now = deadline + 15.0
    (forced,) = world.plan().delete
    assert (forced.name, forced.uid, forced.grace_seconds) == ("x-rollout-0", left["metadata"]["uid"], 0)


# --- the default rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["actor", "rollout", "env"])
@pytest.mark.parametrize(("code", "reason"), [(2, "InvalidConfiguration"), (4, "DataError")])
def test_exit_2_and_4_of_any_role_fail_the_job(role: str, code: int, reason: str) -> None:
    world = running()
    world.end_pod(f"x-{role}-0", code)
    world.settle(ticks=60)
    assert world.phase == "Failed"
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", reason)
    assert f"x-{role}-0" in failed["message"] and "last line" in failed["message"]


def test_codes_of_init_containers_are_not_ours() -> None:
    world = running()
    pod = world.pods["x-actor-0"]
    pod["status"]["initContainerStatuses"] = [
        {"name": "fetch", "state": {"terminated": {"exitCode": 2, "message": "no such file"}}}
    ]
    pod["status"]["phase"] = "Failed"
    world.reconcile()
    assert world.phase == "Restarting"
    failed = world.condition("Failed")
    assert (
        failed["reason"] == "InitContainerFailed"
        and "no such file" in failed["message"]
        and "fetch" in failed["message"]
    )


@pytest.mark.parametrize("disruption", ["PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet"])
def test_disruptions_restart_without_being_counted(disruption: str) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.delete_pod("x-actor-0", disruption=disruption)
    world.run_until(lambda: world.status["epoch"] == 2 and world.phase == "Running")
    assert world.status["restarts"] == 0 and world.status["totalRestarts"] == 1


def test_an_actor_that_someone_deletes_is_a_disruption() -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.delete_pod("x-actor-0")
    world.run_until(lambda: world.status["epoch"] == 2 and world.phase == "Running")
    assert world.status["restarts"] == 0 and world.status["totalRestarts"] == 1
    assert world.condition("Failed")["reason"] == "PodDeleted"


def test_an_actor_that_failed_before_someone_deleted_it_is_a_counted_restart() -> None:
    world = running()
    world.end_pod("x-actor-0", 1)
    world.tick(20)
    pod = world.pods["x-actor-0"]
    pod["metadata"] |= {"deletionTimestamp": to_text(world.now + 30), "deletionGracePeriodSeconds": 30}
    world.reconcile()
    assert world.phase == "Restarting" and world.status["restarts"] == 1


def test_an_actor_pod_that_is_gone_without_a_trace_restarts_the_gang() -> None:
    world = running(actor={"replicas": 2}, algorithm={"steps": 500, "promptsPerStep": 12})
    del world.pods["x-actor-1"]
    world.run_until(lambda: world.status["epoch"] == 2 and world.phase == "Running" and all_there(world))
    assert world.status["restarts"] == 0 and world.status["totalRestarts"] == 1


def test_finished_steps_give_restarts_back() -> None:
    world = running(failurePolicy={"maxRestarts": 1, "forgiveAfterSteps": 10})
    for epoch in (2, 3, 4):
        failed_at = world.steps
        world.end_pod("x-actor-0", 3)
        world.run_until(lambda epoch=epoch: world.status["epoch"] == epoch and world.phase == "Running")
        assert (world.status["restarts"], world.status["forgiveAtStep"]) == (1, failed_at + 10)
        world.run_until(lambda step=failed_at: world.status["step"] >= step + 10)
        assert world.status["restarts"] == 0 and "forgiveAtStep" not in world.status
    assert world.status["totalRestarts"] == 3


def test_steps_that_a_restart_repeats_give_nothing_back() -> None:
    world = running(failurePolicy={"maxRestarts": 2, "forgiveAfterSteps": 4})
    for _ in range(3):
        world.run_until(lambda: world.phase == "Running" and world.status["step"] >= 23, ticks=60)
        world.saved = 15  # the checkpoint every restart begins with: eight steps before the one that fails
        world.end_pod("x-actor-0", 3)
        world.reconcile()
    assert world.phase == "Failed" and world.condition("Failed")["reason"] == "MaxRestartsExceeded"


def test_finished_steps_make_the_next_stall_a_first_one() -> None:
    world = running(failurePolicy={"forgiveAfterSteps": 10})
    for _ in range(2):
        world.stall = stall("WaitingForEnv")
        world.reconcile()
        assert world.condition("Failed")["reason"] == "Stalled" and world.status["epoch"] == 1, "the role restarts"
        world.stall = None
        target = world.status["forgiveAtStep"]
        world.run_until(lambda step=target: world.status["step"] >= step)
        assert not [one for one in world.status.get("ends", []) if one["name"] == "stall"]


def test_a_gang_half_made_when_the_operator_died_is_completed_under_its_epoch() -> None:
    world = World(make_job(actor={"replicas": 3}, algorithm={"steps": 500, "promptsPerStep": 12}))
    world.apply(world.plan(), at_most=9)
    assert 0 < len([name for name in world.pods if "actor" in name]) < 3
    world.run_until(lambda: world.phase == "Running")
    assert world.status["epoch"] == 1 and world.status["totalRestarts"] == 0


def test_the_restart_after_the_last_one_fails_the_job() -> None:
    world = running(failurePolicy={"maxRestarts": 2})
    for restart in range(3):
        world.end_pod("x-actor-0", 3)
        world.run_until(
            lambda restart=restart: (
                (world.status["restarts"] == restart + 1 and world.phase == "Running") or world.phase == "Failed"
            )
        )
    assert world.phase == "Failed" and world.status["restarts"] == 2
    failed = world.condition("Failed")
    assert (
        failed["reason"] == "MaxRestartsExceeded"
        and "maxRestarts" in failed["message"]
        and "code 3" in failed["message"]
    )


def test_a_pod_that_keeps_ending_is_made_again_with_growing_pauses() -> None:
    world = running()
    made = []
    for _ in range(9):
        world.run_until(
            lambda: "x-rollout-0" in world.pods and world.pods["x-rollout-0"]["status"]["phase"] == "Running", ticks=400
        )
        made.append(world.now)
        world.end_pod("x-rollout-0", 1)
        world.reconcile()
    gaps = [later - earlier for earlier, later in itertools.pairwise(made)]
    assert max(gaps[:5]) < 10 <= gaps[5] < gaps[6] < gaps[7], gaps
    assert world.condition("Degraded")["reason"] == "RestartBackOff"
    assert world.phase == "Running" and world.status["epoch"] == 1
    world.tick()
    again = world.plan().requeue_after
    assert again is not None and 0 < again <= 80


def test_the_pause_survives_a_restart_of_the_operator() -> None:
    world = running()
    for _ in range(6):
        world.run_until(
            lambda: "x-rollout-0" in world.pods and world.pods["x-rollout-0"]["status"]["phase"] == "Running", ticks=400
        )
        world.end_pod("x-rollout-0", 1)
        world.reconcile()
    ends = next(e for e in world.status["ends"] if e["name"] == "x-rollout-0")
    assert ends["backoffSeconds"] == 10 and len(ends["times"]) == 6


def test_an_end_is_counted_once_however_often_it_is_seen() -> None:
    world = running()
    world.end_pod("x-rollout-0", 1)
    for _ in range(5):
        world.apply(world.plan(), at_most=1)  # killed after the status, before the deletion
    assert world.role("rollout")["restarts"] == 1 and len(world.status["ends"][0]["times"]) == 1


def test_a_drained_end_of_the_run_does_not_count_as_a_failure() -> None:
    world = running()
    world.end_pod("x-rollout-0", 0)
    world.reconcile()
    world.tick()
    plan = world.reconcile()
    assert not plan.create, "most likely the run is about to end"
    assert world.role("rollout")["failed"] == 0


# --- the user's rules --------------------------------------------------------------------------------------------------


def rules(*entries: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return {"rules": list(entries), **policy}


def test_the_first_rule_that_matches_wins_over_the_defaults() -> None:
    policy = rules(
        {"exitCodes": [2], "roles": ["rollout"], "action": "RestartPod"},
        {"exitCodes": [2], "action": "FailJob"},
    )
    world = running(failurePolicy=policy)
    world.end_pod("x-rollout-0", 2)
    world.settle(ticks=30)
    assert world.phase == "Running" and world.role("rollout")["restarts"] == 1
    world.end_pod("x-env-0", 2)
    world.settle(ticks=30)
    assert world.phase == "Failed" and world.condition("Failed")["reason"] == "FailurePolicyRule"
    assert "rules[1]" in world.condition("Failed")["message"]


def test_an_uncounted_rule_leaves_the_limit_alone() -> None:
    policy = rules({"reasons": ["OOMKilled"], "action": "RestartJob", "countTowardsLimit": False}, maxRestarts=0)
    world = running(failurePolicy=policy)
    world.end_pod("x-actor-0", 137, reason="OOMKilled")
    world.run_until(lambda: world.status["epoch"] == 2 and world.phase == "Running")
    assert world.status["restarts"] == 0


def test_a_rollout_rule_may_restart_the_job() -> None:
    world = running(failurePolicy=rules({"roles": ["rollout"], "messagePattern": "last*line", "action": "RestartJob"}))
    world.end_pod("x-rollout-1", 1)
    world.run_until(lambda: world.status["epoch"] == 2 and world.phase == "Running" and all_there(world))
    assert world.status["restarts"] == 1


def test_a_rule_may_restart_the_whole_role() -> None:
    world = running(failurePolicy=rules({"roles": ["rollout"], "exitCodes": [9], "action": "RestartRole"}))
    before = uids(world, "rollout")
    world.tick(5)
    world.end_pod("x-rollout-1", 9)
    world.run_until(lambda: not before & uids(world, "rollout") and all_there(world))
    assert world.status["epoch"] == 1
    again = uids(world, "rollout")
    world.settle(ticks=30)
    assert uids(world, "rollout") == again, "once"


# --- stalls and numbers ------------------------------------------------------------------------------------------------


def stall(reason: str) -> dict[str, Any]:
    return {
        "reason": reason,
        "message": "no progress for 400 s",
        "since": 400.0,
        "waits": [{"who": "runner", "on": "rollout", "what": "generating"}],
    }


def test_a_stall_restarts_the_role_once_then_the_job() -> None:
    world = running()
    before = uids(world, "rollout")
    world.stall = stall("WaitingForRollout")
    world.run_until(lambda: not before & uids(world, "rollout"))
    assert world.status["epoch"] == 1
    world.run_until(lambda: world.status["epoch"] == 2, ticks=700)
    assert world.now - START > 300, "the same silence is acted on again after 300 s only"
    assert world.status["restarts"] == 1 and world.condition("Failed")["reason"] == "Stalled"


def test_an_operator_whose_clock_runs_fast_does_not_delete_the_replacements() -> None:
    world = running()
    world.operator_ahead = 60.0
    for name in ("x-rollout-0", "x-rollout-1"):
        del world.pods[name]
    world.stall = stall("WaitingForRollout")
    world.reconcile()
    assert "RoleRestarted" in [event.reason for event in world.events]
    world.stall = None
    world.run_until(lambda: world.role("rollout")["ready"] == 2, ticks=10)
    before = {name: uid_of(pod) for name, pod in world.pods.items()}
    world.go_on(ticks=20)
    assert {name: uid_of(pod) for name, pod in world.pods.items()} == before


def test_a_stall_for_want_of_pods_triggers_nothing() -> None:
    world = running()
    world.stall = stall("WaitingForPods")
    world.settle(ticks=40)
    assert world.phase == "Running" and world.status["totalRestarts"] == 0 and world.role("rollout")["restarts"] == 0


@pytest.mark.parametrize("action", ["RestartJob", "FailJob", "Pause"])
def test_the_action_of_a_stall_is_the_users(action: str) -> None:
    world = running(failurePolicy={"stall": {"action": action}})
    world.stall = stall("WaitingForActor")
    outcome = {"RestartJob": "Restarting", "FailJob": "Failed", "Pause": "Suspended"}[action]
    world.run_until(lambda: world.phase == outcome)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"nonFiniteLoss": {"action": "RestartFromCheckpoint"}}, "NonFiniteLoss"),
        ({"rewardCollapse": {"below": 0.1, "steps": 3, "action": "RestartFromCheckpoint"}}, "RewardCollapse"),
        ({"klBlowUp": {"above": 1.0, "action": "RestartFromCheckpoint"}}, "KlBlowUp"),
        ({"mismatch": {"kl": 0.01, "steps": 1, "action": "RestartFromCheckpoint"}}, "PolicyMismatch"),
    ],
    ids=["nonFiniteLoss", "rewardCollapse", "klBlowUp", "mismatch"],
)
def test_bad_numbers_go_back_to_the_checkpoint_without_saving(rule: dict[str, Any], reason: str) -> None:
    world = running(failurePolicy=rule)
    name = next(iter(rule))
    world.streaks = {name: rule[name].get("steps", 1) - 1}
    world.reconcile()
    assert world.status["epoch"] == 1, "one step fewer than the rule says"
    world.tick(4)
    saved, world.streaks = world.saved, {name: 3}
    world.run_until(lambda: world.status["epoch"] == 2)
    assert world.saved == saved
    assert [c.body for c in world.calls if c.method == "POST /finish"] == [{"reason": "rollback"}]
    assert world.condition("Failed")["reason"] == reason and world.status["restarts"] == 1
    world.run_until(lambda: world.phase == "Running")


def test_a_runner_that_rolled_back_before_it_was_asked_is_restarted_once_and_under_the_rules_name() -> None:
    world = running(failurePolicy={"klBlowUp": {"above": 1.0, "action": "RestartFromCheckpoint"}})
    world.streaks = {"klBlowUp": 1}
    world.end_pod("x-actor-0", 3)
    world.run_until(lambda: world.status["epoch"] == 2)
    assert world.condition("Failed")["reason"] == "KlBlowUp"
    assert not [call for call in world.calls if call.method == "POST /finish"], "there is nobody left to ask"
    world.run_until(lambda: world.phase == "Running")
    assert world.status["restarts"] == 1 and world.status["epoch"] == 2


def test_a_network_policy_that_somebody_opened_is_applied_again() -> None:
    world = running()
    opened = world.objects["NetworkPolicy", "x-env"]
    opened["spec"]["ingress"].append({})
    assert [obj["metadata"]["name"] for obj in world.reconcile().ensure] == ["x-env"]
    assert world.objects["NetworkPolicy", "x-env"]["spec"]["ingress"] != opened["spec"]["ingress"]
    assert not world.reconcile().ensure


def test_a_field_of_a_network_policy_without_effect_is_left_alone() -> None:
    world = running()
    world.objects["NetworkPolicy", "x-actor-0"]["spec"]["egress"] = [{}]  # its policyTypes have no Egress
    assert not world.reconcile().ensure
