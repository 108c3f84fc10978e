"""`reconcile` over states nobody planned: total, free of contradictions, settled by its own status, indifferent to when it is killed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.api.status import RLJobStatus
from rljob_operator.model import Observed, Plan
from rljob_operator.reconcile import reconcile
from rljob_operator.reconcile.conditions import REASONS, TYPES
from rljob_operator.reconcile.parsing import ParsedJob
from tests.unit.operator.simulator import CONFIG, START, World, make_job
from tests.unit.operator.states import UID, bytes_of_a_state, known_of, state

MANY = settings(
    max_examples=int(os.environ.get("RLJOB_EXAMPLES", "2000")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
FEWER = settings(MANY, max_examples=100)
"""Of tests that understand specs anew, which costs ten times as much."""
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**19), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def look(job: dict[str, Any], observed: Observed, now: float = START) -> Plan:
    """Make the plan of one look."""
    return reconcile(job, observed, now, config=CONFIG, known=known_of(job))


def settled(job: dict[str, Any], observed: Observed, now: float) -> tuple[dict[str, Any], Plan]:
    """Return the job, and its plan, after the few looks that intents take with nothing else changed: nothing is left to write."""
    for _ in range(5):
        plan = look(job, observed, now)
        if plan.status is None:
            return job, plan
        job = {**job, "status": json.loads(json.dumps(plan.status))}
    raise AssertionError(f"never settles: {plan.status}")


@MANY
@given(bytes_of_a_state)
def test_a_plan_never_contradicts_itself(data: bytes) -> None:
    job, observed = state(data)
    plan = look(job, observed)
    made = [pod["metadata"]["name"] for pod in plan.create]
    gone = [(deletion.kind, deletion.name) for deletion in plan.delete]
    present = {pod.name: pod for pod in observed.pods}
    assert len(set(made)) == len(made) and len(set(gone)) == len(gone)
    assert not set(made) & set(present)
    for deletion in plan.delete:
        if deletion.kind == "Pod":
            pod = present[deletion.name]
            abandoned = pod.job_uid != "" and pod.deleting and deletion.grace_seconds == 0
            assert pod.uid == deletion.uid and (pod.job_uid == UID or abandoned), "our own, or on a dead node"
    before = job.get("status") or {}
    status = plan.status if plan.status is not None else before
    assert plan.requeue_after is None or plan.requeue_after >= 0
    if before.get("phase") in ("Succeeded", "Failed"):
        assert status["phase"] == before["phase"] and not made
        return
    assert status["epoch"] >= max([before.get("epoch", 0), *(pod.epoch for pod in observed.pods if pod.job_uid == UID)])
    assert {c["type"]: c["reason"] in REASONS[c["type"]] for c in status["conditions"]} == dict.fromkeys(TYPES, True)
    if status["phase"] == "Suspended":
        assert not [pod for pod in observed.pods if pod.job_uid == UID] and not made
    if status["epoch"] == before.get("epoch") == before.get("begunEpoch") and before["epoch"]:
        assert status.get("step", 0) >= before.get("step", 0)
    if observed.name_conflicts:
        assert not made


@MANY
@given(bytes_of_a_state, st.sampled_from([0.0, 0.5, 16.0, 121.0, 4000.0]))
def test_an_equal_look_gives_an_equal_plan_writes_nothing_and_asks_for_no_turn_at_once(
    data: bytes, later: float
) -> None:
    job, observed = state(data)
    now = START + later
    job, plan = settled(job, observed, now)
    assert look(job, observed, now) == plan, "the same observation twice"
    if not (plan.delete or plan.create or plan.ensure):
        assert plan.requeue_after is None or plan.requeue_after > 0
    if plan.requeue_after is not None and plan.requeue_after > 1.0:
        early = look(job, observed, now + plan.requeue_after / 2)
        assert early.delete == plan.delete and early.create == plan.create, "what is due before the wait is over"


@FEWER
@given(bytes_of_a_state)
def test_every_status_is_valid(data: bytes) -> None:
    plan = look(*state(data))
    if plan.status is not None:
        RLJobStatus.model_validate(json.loads(json.dumps(plan.status)))


@FEWER
@given(st.lists(bytes_of_a_state, min_size=2, max_size=3))
def test_what_an_earlier_look_understood_changes_no_plan(looks: list[bytes]) -> None:
    known = ParsedJob()
    for job, observed in map(state, looks):
        for config in (CONFIG, replace(CONFIG, images={"env": "other:1"})):
            assert reconcile(job, observed, START, config=config, known=known) == reconcile(
                job, observed, START, config=config
            )


@FEWER
@given(
    job=st.dictionaries(st.sampled_from(["metadata", "spec", "status", "kind"]), junk),
    status=junk,
    now=st.floats(0, 4e9),
)
def test_any_json_gives_a_plan(job: dict[str, Any], status: Any, now: float) -> None:
    plan = reconcile(job, Observed(), now, config=CONFIG)
    assert not plan.delete and not plan.create
    whole = make_job() | {"status": status}
    plan = reconcile(whole, Observed(), now, config=CONFIG)
    assert plan.status is not None
    RLJobStatus.model_validate(json.loads(json.dumps(plan.status)))


@settings(MANY, max_examples=40)
@given(
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    faults=st.lists(
        st.tuples(
            st.integers(1, 25), st.sampled_from(["x-actor-0", "x-rollout-1", "x-env-0"]), st.sampled_from([1, 3, 137])
        ),
        max_size=3,
    ),
    edit=st.sampled_from([None, {"rollout": {"replicas": 4}}, {"rollout": {"replicas": 1}}]),
)
def test_an_operator_killed_between_any_two_effects_leads_to_the_same_end(
    cuts: list[int], faults: list[tuple[int, str, int]], edit: dict[str, Any] | None
) -> None:
    ends = []
    for interrupted in (False, True):
        world, left = World(make_job(algorithm={"steps": 40})), list(cuts)
        for tick in range(400):
            for at, name, code in faults:
                if at == tick:
                    world.end_pod(name, code)
            if edit is not None and tick == 10:
                world.edit(**edit)
            world.apply(world.plan(), at_most=left.pop() if interrupted and left else None)
            world.tick()
            if world.phase in ("Succeeded", "Failed") and tick > 50:
                break
        roles = {role["name"]: role["desired"] for role in world.status["roles"]}
        ends.append((world.phase, world.status["step"], roles, sorted(world.pods)))
    assert ends[0] == ends[1]
    assert ends[0][0] == "Succeeded"
