"""`reconcile` over states nobody planned: total, free of contradictions, settled by its own status, indifferent to when it is killed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import CONFIG, START, World, make_job

from rl_core.api.status import RLJobStatus
from rljob_operator.model import Observed, Progress
from rljob_operator.reconcile import reconcile, views
from rljob_operator.reconcile.conditions import REASONS, TYPES
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.times import to_text

UID = "0f9d2c1e-0000"
MANY = settings(
    max_examples=int(os.environ.get("RLJOB_EXAMPLES", "1000")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
FEWER = settings(MANY, max_examples=150)
"""Of tests that draw several states an example: they cost several times as much."""

words = st.sampled_from(
    [
        "",
        "Error",
        "OOMKilled",
        "Evicted",
        "x",
        '{"reason": "r", "tail": ["a"], "summary": {"step": 3, "epoch": 1}}',
        "[1",
        "{}",
    ]
)
times = st.floats(-4000, 4000).map(lambda offset: to_text(START + offset))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**19), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def containers(draw: st.DrawFn) -> list[dict[str, Any]]:
    state = draw(
        st.one_of(
            st.just({}),
            st.just({"running": {}}),
            st.builds(
                lambda r, m: {"waiting": {"reason": r, "message": m}},
                st.sampled_from(["ErrImagePull", "PodInitializing"]),
                words,
            ),
            st.builds(
                lambda c, r, m: {"terminated": {"exitCode": c, "reason": r, "message": m}},
                st.sampled_from([0, 1, 2, 3, 4, 137]),
                words,
                words,
            ),
        )
    )
    return [{"name": "c", "state": state}]


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    role, index = draw(st.sampled_from(["actor", "rollout", "env", "other"])), draw(st.integers(0, 4))
    owner = draw(st.sampled_from([UID, UID, UID, "older", ""]))
    status: dict[str, Any] = {"phase": draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]))}
    status["conditions"] = [
        {
            "type": kind,
            "status": draw(st.sampled_from(["True", "False", "Unknown"])),
            "reason": draw(words),
            "message": draw(words),
        }
        for kind in draw(st.sets(st.sampled_from(["Ready", "PodScheduled", "DisruptionTarget"])))
    ]
    status["containerStatuses"] = draw(containers())
    status["initContainerStatuses"] = draw(st.one_of(st.just([]), containers()))
    if draw(st.booleans()):
        status |= {"startTime": to_text(START), "podIP": "10.0.0.9"}
    meta: dict[str, Any] = {
        "name": f"x-{role}-{index}",
        "uid": draw(st.sampled_from(["u1", "u2"])) + f"{role}{index}",
        "creationTimestamp": draw(times),
        "labels": {
            "rljob.dev/role": role,
            "rljob.dev/index": str(index),
            "rljob.dev/epoch": str(draw(st.integers(0, 4))),
        },
    }
    meta |= {"ownerReferences": [{"kind": "RLJob", "uid": owner}]} if owner else {}
    meta |= {"deletionTimestamp": draw(times)} if draw(st.booleans()) else {}
    return {"metadata": meta, "spec": {"nodeName": draw(st.sampled_from(["", "n1"]))}, "status": status}


@st.composite
def statuses(draw: st.DrawFn) -> dict[str, Any] | None:
    if draw(st.booleans()):
        return None
    conditions = [
        {
            "type": kind,
            "status": draw(st.sampled_from(["True", "False", "Unknown"])),
            "reason": draw(st.sampled_from(sorted(REASONS[kind]))),
            "message": "",
            "lastTransitionTime": draw(times),
            "observedGeneration": draw(st.integers(0, 3)),
        }
        for kind in draw(st.sets(st.sampled_from(TYPES)))
    ]
    return {
        "phase": draw(
            st.sampled_from(
                ["Pending", "Starting", "Running", "Suspending", "Suspended", "Restarting", "Succeeded", "Failed"]
            )
        ),
        "epoch": draw(st.integers(0, 4)),
        "restarts": draw(st.integers(0, 4)),
        "totalRestarts": draw(st.integers(0, 6)),
        "step": draw(st.integers(0, 50)),
        "roles": [{"name": "actor", "active": draw(st.integers(0, 3)), "restarts": draw(st.integers(0, 3))}],
        "startTime": draw(times),
        "completionTime": draw(times),
        "ends": [
            {
                "name": draw(st.sampled_from(["actor", "stall", "x-rollout-0"])),
                "uid": "u1rollout0",
                "times": [draw(times)],
                "backoffSeconds": 20,
            }
        ],
        "draining": [{"pod": "x-rollout-3", "since": draw(times)}],
        "conditions": conditions,
    }


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    job = make_job(
        UID,
        actor={"replicas": draw(st.integers(1, 3))},
        rollout={"replicas": draw(st.integers(1, 4)), "minReplicas": draw(st.integers(0, 1))},
        algorithm={"promptsPerStep": 12},
        suspend=draw(st.booleans()),
        failurePolicy={
            "maxRestarts": draw(st.integers(0, 5)),
            "rules": draw(st.lists(st.sampled_from(RULES), max_size=2)),
            "stall": {"action": draw(st.sampled_from(["RestartRole", "RestartJob", "Pause", "FailJob"]))},
            "klBlowUp": {"above": 1.0, "action": draw(st.sampled_from(["RestartFromCheckpoint", "Pause", "FailJob"]))},
        },
        deletionPolicy={"onSuccess": draw(st.sampled_from(["KeepAll", "KeepActor", "DeletePods"]))},
    )
    for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "startDeadlineSeconds"):
        if draw(st.booleans()):
            job["spec"][field] = draw(st.integers(1, 5000))
    job["metadata"]["generation"] = draw(st.integers(1, 3))
    status = draw(statuses())
    return job | ({"status": status} if status is not None else {})


RULES: list[dict[str, Any]] = [
    {"exitCodes": [1], "action": "RestartJob", "countTowardsLimit": False},
    {"roles": ["rollout"], "reasons": ["OOMKilled"], "action": "RestartRole"},
    {"roles": ["env", "rollout"], "podConditions": ["DisruptionTarget"], "action": "Ignore"},
    {"messagePattern": "x*y", "action": "FailJob"},
]


@st.composite
def progresses(draw: st.DrawFn) -> Progress | None:
    status = draw(
        st.one_of(
            st.dictionaries(
                st.sampled_from(
                    [
                        "phase",
                        "epoch",
                        "step",
                        "members",
                        "roles",
                        "stall",
                        "metrics",
                        "missing",
                        "streaks",
                        "checkpoint",
                    ]
                ),
                junk,
            ),
            st.builds(
                lambda epoch, step, phase, streak: {
                    "phase": phase,
                    "epoch": epoch,
                    "step": step,
                    "policyVersion": step,
                    "appliedGeneration": 0,
                    "stall": {"reason": "WaitingForEnv", "since": 500.0},
                    "streaks": {"klBlowUp": streak},
                    "members": [{"pod": "x-rollout-3", "state": "serving"}],
                },
                st.integers(0, 4),
                st.integers(0, 60),
                st.sampled_from(["Starting", "Training", "Finished"]),
                st.integers(0, 1),
            ),
        )
    )
    failing = draw(st.one_of(st.none(), st.floats(0, 60).map(lambda ago: START - ago)))
    uid = draw(st.sampled_from(["u1actor0", "u2actor0"]))
    return draw(
        st.sampled_from(
            [None, Progress(status=status, at=START, pod_uid=uid, error="e" if failing else "", failing_since=failing)]
        )
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Any], Observed]:
    found = {pod["metadata"]["name"]: pod for pod in draw(st.lists(pods(), max_size=8))}
    foreign = draw(st.sampled_from([(), (), (), ("Service/x",)]))
    refusals = draw(st.sampled_from([{}, {}, {"Pod/x-env-0": "exceeded quota: q"}, {"Service/x": "denied"}]))
    return draw(jobs()), views.observe(
        pods=list(found.values()), foreign=foreign, refusals=refusals, progress=draw(progresses())
    )


def settles(job: dict[str, Any], observed: Observed) -> None:
    """Check that with nothing else changed the status is written no more, after the few steps that intents take."""
    for _ in range(5):
        plan = reconcile(job, observed, START, config=CONFIG)
        if plan.status is None:
            assert plan.requeue_after is None or plan.requeue_after > 0, "an equal look must not follow at once"
            return
        job = {**job, "status": json.loads(json.dumps(plan.status))}
    raise AssertionError(f"never settles: {plan.status}")


@MANY
@given(states())
def test_a_plan_never_contradicts_itself_and_its_status_settles(state: tuple[dict[str, Any], Observed]) -> None:
    job, observed = state
    settles(job, observed)
    plan = reconcile(job, observed, START, config=CONFIG)
    made = [pod["metadata"]["name"] for pod in plan.create]
    gone = [(deletion.kind, deletion.name) for deletion in plan.delete]
    present = {pod.name: pod for pod in observed.pods}
    assert len(set(made)) == len(made) and len(set(gone)) == len(gone)
    assert not set(made) & set(present)
    for deletion in plan.delete:
        if deletion.kind == "Pod":
            assert present[deletion.name].uid == deletion.uid and present[deletion.name].job_uid == UID, "only our own"
    before = job.get("status") or {}
    status = plan.status if plan.status is not None else before
    assert plan.requeue_after is None or plan.requeue_after >= 0
    if plan.status is not None:
        RLJobStatus.model_validate(json.loads(json.dumps(plan.status)))
    if before.get("phase") in ("Succeeded", "Failed"):
        assert status["phase"] == before["phase"] and not made
        return
    assert status["epoch"] >= max([before.get("epoch", 0), *(pod.epoch for pod in observed.pods if pod.job_uid == UID)])
    assert {c["type"]: c["reason"] in REASONS[c["type"]] for c in status["conditions"]} == dict.fromkeys(TYPES, True)
    if status["phase"] == "Suspended":
        assert not [pod for pod in observed.pods if pod.job_uid == UID] and not made
    if status["epoch"] == before.get("epoch") and before.get("phase") == "Running":
        assert status.get("step", 0) >= before.get("step", 0)
    if observed.foreign:
        assert not made


@FEWER
@given(st.lists(states(), min_size=2, max_size=3))
def test_what_an_earlier_look_understood_changes_no_plan(looks: list[tuple[dict[str, Any], Observed]]) -> None:
    known = ParsedJob()
    for job, observed in looks:
        for config in (CONFIG, replace(CONFIG, images={"env": "other:1"})):
            assert reconcile(job, observed, START, config=config, known=known) == reconcile(
                job, observed, START, config=config
            )


@MANY
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
