"""A job without pods for a while: suspended by its user or paused by a rule, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.operator.simulator import World, make_job, running


def test_suspending_saves_first_then_frees_everything_and_resuming_goes_on() -> None:
    world = running()
    world.edit(suspend=True)
    plan = world.reconcile()
    assert plan.status is not None and plan.status["phase"] == "Suspending" and not plan.delete
    assert [(call.method, call.body) for call in plan.calls] == [("POST /finish", {"reason": "suspend"})]
    world.run_until(lambda: world.phase == "Suspended")
    assert not world.pods and world.condition("Suspended")["status"] == "True"
    step = world.saved
    world.now += 1000
    world.edit(suspend=False)
    plan = world.reconcile()
    assert plan.status is not None and plan.status["epoch"] == 2 and not plan.create
    world.run_until(lambda: world.phase == "Running")
    assert world.status["step"] >= step and world.status["restarts"] == world.status["totalRestarts"] == 0
    assert world.status["suspendedSeconds"] >= 1000 and world.status["runtimeSeconds"] < 100


@pytest.mark.parametrize(
    ("spec", "seconds"), [({}, 120), ({"runtime": {"suspendSeconds": 7}}, 7)], ids=["default", "set"]
)
def test_a_runner_that_does_not_save_in_time_is_not_waited_for(spec: dict, seconds: int) -> None:
    world = running(**spec)
    world.silent_since = world.now
    world.edit(suspend=True)
    world.reconcile()
    world.tick(seconds - 1)
    assert not world.reconcile().delete
    world.tick(1)
    assert len(world.reconcile().delete) == 4


@pytest.mark.parametrize("again", [False, True], ids=["never ran", "resumed"])
def test_a_job_that_has_finished_no_step_since_it_started_gives_its_devices_back_at_once(again: bool) -> None:
    world = running() if again else World(make_job())
    if again:
        world.end_pod("x-actor-0", 3)
        world.run_until(lambda: world.status["epoch"] == 2 and "x-actor-0" in world.pods)
    world.run_until(lambda: world.phase == "Starting")
    world.pods["x-actor-0"]["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
    world.edit(suspend=True)
    plan = world.reconcile()
    assert world.phase == "Suspending" and len(plan.delete) == 4 and not plan.calls


def test_conditions_are_for_readers_the_decision_is_kept_beside_them() -> None:
    world = running()
    world.edit(suspend=True)
    world.run_until(lambda: world.phase == "Suspended")
    for condition in world.job["status"]["conditions"]:
        condition |= {"status": "False", "reason": "Edited"}
    world.settle(ticks=30)
    assert world.phase == "Suspended" and not world.pods and world.condition("Suspended")["status"] == "True"


def test_a_job_that_an_operator_without_the_field_paused_stays_paused() -> None:
    world = running(failurePolicy={"klBlowUp": {"above": 1.0, "action": "Pause"}})
    world.streaks = {"klBlowUp": 1}
    world.run_until(lambda: world.phase == "Suspended")
    for field in ("halt", "begunEpoch"):
        del world.job["status"][field]
    world.settle(ticks=30)
    assert world.phase == "Suspended" and world.condition("Suspended")["reason"] == "Paused"
    world.edit(suspend=True)
    world.reconcile()
    world.edit(suspend=False)
    world.run_until(lambda: world.phase == "Running")


def test_a_job_made_suspended_holds_nothing_until_it_is_resumed() -> None:
    world = World(make_job(suspend=True))
    world.settle(ticks=20)
    assert world.phase == "Suspended" and not world.pods and not world.created and "startTime" not in world.status
    world.now += 500
    world.edit(suspend=False)
    world.run_until(lambda: world.phase == "Running")
    assert world.status["epoch"] == 1 and world.status["runtimeSeconds"] < 100


def test_a_job_of_another_controller_is_left_alone() -> None:
    world = World(make_job(managedBy="kueue.x-k8s.io/multikueue"))
    assert world.plan().status is None and not world.plan().create
    assert World(make_job(managedBy="rljob.dev/operator")).plan().create


def paused(**policy: object) -> World:
    world = running(failurePolicy={"klBlowUp": {"above": 1.0, "action": "Pause"}, **policy})
    world.run_until(lambda: world.saved > 0)
    world.streaks = {"klBlowUp": 1}
    return world


def test_a_paused_job_keeps_its_last_good_checkpoint_and_names_it_in_a_field_of_its_own() -> None:
    world = paused()
    world.tick(3)
    good = world.saved
    world.run_until(lambda: world.phase == "Suspended")
    assert [call.body for call in world.calls if call.method == "POST /finish"] == [{"reason": "rollback"}]
    assert not world.pods and world.saved == good, "what the rule found wrong is not saved"
    suspension, told = world.status["halt"], world.condition("Suspended")
    assert (suspension["by"], suspension["rule"], suspension["lastGoodStep"], suspension["done"]) == (
        "rule",
        "KlBlowUp",
        good,
        True,
    )
    assert (told["status"], told["reason"]) == ("True", "Paused")
    words = f"the last good checkpoint is at step {good}; to resume from it"
    assert "approx_kl above" in told["message"] and words in told["message"] and "rljob resume" in told["message"]


def test_a_runner_that_ended_by_itself_before_it_was_asked_is_paused_too() -> None:
    world = paused()
    good = world.saved
    world.end_pod("x-actor-0", 3)
    world.run_until(lambda: world.phase == "Suspended")
    assert (
        world.status["halt"]["lastGoodStep"] == good and world.status["restarts"] == world.status["totalRestarts"] == 0
    )


@pytest.mark.parametrize(
    "edit",
    [
        {"rollout": {"replicas": 3, "minReplicas": 1}},
        {"actor": {"optimizer": {"learningRate": 1e-7}}},
        {"suspend": False},
    ],
    ids=["scaled", "edited", "not suspended"],
)
def test_a_pause_survives_scaling_and_edits(edit: dict[str, object]) -> None:
    world = paused()
    world.run_until(lambda: world.phase == "Suspended")
    world.edit(**edit)
    world.settle(ticks=40)
    assert world.phase == "Suspended" and world.condition("Suspended")["reason"] == "Paused" and not world.pods


def test_only_a_suspension_that_is_taken_back_ends_a_pause() -> None:
    world = paused()
    world.run_until(lambda: world.phase == "Suspended")
    good = world.saved
    world.edit(suspend=True)
    world.settle(ticks=5)
    assert world.condition("Suspended")["reason"] == "Suspended" and world.status["halt"]["by"] == "user"
    world.edit(suspend=False)
    world.run_until(lambda: world.phase == "Running")
    assert world.status["epoch"] == 2 and world.status["restarts"] == 0 and world.status["step"] >= good
    assert "halt" not in world.status


def test_a_stall_that_pauses_saves_what_is_there() -> None:
    world = running(failurePolicy={"stall": {"action": "Pause"}})
    world.stall = {"since": 900.0, "reason": "WaitingForActor", "waits": []}
    world.run_until(lambda: world.phase == "Suspended")
    assert [call.body for call in world.calls if call.method == "POST /finish"] == [{"reason": "suspend"}]
    assert world.status["halt"]["rule"] == "Stalled" and world.status["halt"]["lastGoodStep"] == world.saved


SMALLER = {"actor": {"replicas": 1}, "rollout": {"engine": "sglang"}}


def suspending() -> World:
    world = running(actor={"replicas": 2})
    world.edit(suspend=True)
    world.reconcile()
    assert world.phase == "Suspending" and len(world.pods) == 5
    return world


@pytest.mark.parametrize("world", [suspending, lambda: running(actor={"replicas": 2})], ids=["suspending", "not seen"])
def test_a_resume_together_with_edits_keeps_no_pod_of_the_older_spec(world: Callable[[], World]) -> None:
    """In the second case the operator sees the spec only once it is resumed, by a gang that has one pod too many."""
    before = world()
    old = {pod["metadata"]["uid"] for pod in before.pods.values()}
    before.edit(suspend=False, **SMALLER)
    before.run_until(lambda: not old & {pod["metadata"]["uid"] for pod in before.pods.values()})
    before.run_until(lambda: before.phase == "Running")
    assert "x-actor-1" not in before.pods and before.status["epoch"] == 2 and before.status["restarts"] == 0
