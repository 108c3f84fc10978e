"""rollout.autoscale as the operator carries it out: when it decides, what it writes, and whose word wins."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Forbidden
from rljob_operator.model import JobEvent, Scale
from tests.unit.operator.simulator import World, running
from tests.unit.operator.test_apply import KEY, Bench

AUTOSCALE = {"min": 1, "max": 8, "targetIdle": 0.2}


def workload(count: int, *, starved: float = 0.0, trainer: float = 0.9, full: bool = True) -> dict[str, Any]:
    rollouts = [{"name": f"rollout:{index}", "busy": 1 - starved, "starved": starved} for index in range(count)]
    return {"full": full, "seconds": 60.0, "starved": starved, "actorStarved": trainer, "rollouts": rollouts}


def job(**rollout: Any) -> World:
    """Return a world whose job trains with two rollouts that a rule scales."""
    return running(rollout={"replicas": 2, "autoscale": AUTOSCALE, **rollout})


def test_a_hungry_trainer_gets_more_rollouts_and_idle_ones_go() -> None:
    world = job()
    world.workload = workload(2)
    plan = world.reconcile()
    assert plan.scale is not None and plan.scale.replicas == 4 and "2 -> 4" in plan.scale.event.message
    world.workload = workload(2, full=False)
    world.run_until(lambda: world.role("rollout")["ready"] == 4)
    world.workload = workload(4, starved=0.7, trainer=0.0)
    assert world.reconcile().scale is not None
    world.workload = workload(4, full=False)
    world.run_until(lambda: world.role("rollout")["active"] == 2)
    assert world.status["restarts"] == 0 and world.status["epoch"] == 1


def test_a_window_of_the_size_before_decides_nothing() -> None:
    world = job()
    world.workload = workload(2)
    world.reconcile()
    for _ in range(20):  # the new rollouts are there long before the runner has measured them
        world.tick()
        assert world.reconcile().scale is None


def test_an_edit_of_the_users_is_first_taken_by_the_runner() -> None:
    world = job()
    world.workload = workload(2)
    world.silent_since = None
    world.edit(algorithm={"steps": 400})
    plan = world.plan()
    assert plan.scale is None and [call.method for call in plan.calls] == ["PUT /control"]
    world.apply(plan)
    assert world.plan().scale is not None


@pytest.mark.parametrize("why", ["suspended", "silent", "draining", "no rule", "nothing told"])
def test_nothing_is_scaled(why: str) -> None:
    world = job() if why != "no rule" else running(rollout={"replicas": 2})
    if why == "draining":
        world.edit(rollout={"replicas": 3})
        world.run_until(lambda: world.role("rollout")["ready"] == 3)
        world.edit(rollout={"replicas": 2})
        world.reconcile()
        world.drained.clear()
    world.workload = None if why == "nothing told" else workload(2)
    if why == "suspended":
        world.edit(suspend=True)
    if why == "silent":
        world.silent_since = world.now - 1
    assert world.plan().scale is None


def scale(generation: int = 1) -> Scale:
    return Scale(
        replicas=4, generation=generation, event=JobEvent(type="Normal", reason="Autoscaled", message="2 -> 4")
    )


@pytest.fixture
def bench(cluster: Any) -> Bench:
    bench = Bench(cluster)
    found = cluster.put(
        kinds.RLJOB,
        "ns",
        {"metadata": {"name": "x", "uid": "job-uid", "generation": 1}, "status": {"phase": "Running"}},
    )
    bench.cache.put(kinds.RLJOB, found)
    return bench


async def test_the_number_is_written_by_the_scale_subresource_and_told(bench: Bench) -> None:
    applied = await bench.apply(scale=scale(), status={"phase": "Running", "step": 1})
    assert bench.cluster.scaled == [("x", 4)] and applied.again_after == 0.0
    assert [event.reason for event in bench.recorder.events] == ["Autoscaled"]


async def test_a_newer_spec_is_the_users_word(bench: Bench) -> None:
    await bench.apply(scale=scale(generation=0))
    assert bench.cluster.scaled == [] and bench.recorder.events == []
    edited = bench.cluster.objects["RLJob", "ns", "x"]["metadata"] | {"generation": 2}
    bench.cluster.put(kinds.RLJOB, "ns", {"metadata": edited})  # the cache has not seen it
    await bench.apply(scale=scale())
    assert bench.cluster.scaled == [] and bench.recorder.events == []
    assert bench.cache.job(KEY)["metadata"]["generation"] == 2


async def test_a_refusal_is_told_and_tried_again_later(bench: Bench) -> None:
    bench.cluster.fail("patch", "x", Forbidden("no right to rljobs/scale"))
    applied = await bench.apply(scale=scale())
    (event,) = bench.recorder.events
    assert event.reason == "AutoscaleRefused" and "no right to rljobs/scale" in event.message
    assert applied.again_after > 0
    await bench.apply(scale=scale())
    assert bench.cluster.scaled == [], "its time has not come"
    bench.now[0] += 60.0
    await bench.apply(scale=scale())
    assert bench.cluster.scaled == [("x", 4)]
