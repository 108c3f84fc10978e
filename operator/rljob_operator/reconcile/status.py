"""The new status of a job, from the report of the runner, the pods, the record and the conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.plan.groups import ACTOR, ENV, ROLLOUT
from rljob_operator import naming
from rljob_operator.model import Object
from rljob_operator.reconcile import condition_facts, conditions, deadlines
from rljob_operator.reconcile.conditions import Fact
from rljob_operator.reconcile.job_view import JobView, is_active
from rljob_operator.reconcile.lifecycle import Decision, Stage
from rljob_operator.reconcile.record import Record, draining_status, pod_failures_status, suspension_status
from rljob_operator.reconcile.report import LONGEST_NAME, LONGEST_PATH, MOST, Report, finite, whole_number
from rljob_operator.times import to_seconds, to_text

PROGRESS = (
    "step",
    "totalSteps",
    "policyVersion",
    "reward",
    "lag",
    "runtimeSeconds",
    "checkpoint",
    "metrics",
    "busy",
    "devices",
    "columns",
)
"""Fields that are written at most once per progress interval when nothing else changes."""
MOST_ROLLOUTS = 1024
"""Most rollouts of a job."""
DEVICES = 64
"""Most devices of a pod in a status."""
SUCCESS = "env/success_once"
METRICS = (
    "reward/mean",
    "env/return",
    SUCCESS,
    "val/accuracy",
    "val/reward_mean",
    "val/return",
    "train/loss",
    "train/approx_kl",
    "train/entropy",
    "train/grad_norm",
    "train/staleness_max",
    "rollout/truncation_rate",
    "rollout/starved_seconds",
    "rollout/queue_depth",
    "actor/starved_seconds",
    "actor/queue_depth",
    "rollout/tokens_per_second",
    "rollout/running",
    "rollout/waiting",
    "rollout/kv_use",
    "rollout/queue_seconds",
    "rollout/prefix_hit_share",
    "mismatch/kl",
    "mismatch/max_ratio",
    "ledger/dropped",
    "weights/pause_seconds",
    "perf/tokens_per_second",
    "time/step",
)
"""Metrics in the status, for `kubectl describe`. The runner exports all metrics (`/status`, metrics.jsonl, the trackers)."""
COLUMNS = {"rollouts": ROLLOUT, "actors": ACTOR, "envs": ENV}
"""Columns of `kubectl get` that count the ready pods of a group."""
SHARES = {
    "rollout/busy_share": "busy",
    "rollout/starved_share": "starved",
    "actor/starved_share": "actorStarved",
}
"""Shares of the runner's window (runner/workload.py), which moves on within a step: name -> field of its `/status.workload`."""


def build(
    view: JobView, decision: Decision, facts: Mapping[str, Fact], draining: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the new status; None when it is unchanged. A change of `runtimeSeconds` alone does not count."""
    old_status = view.record.raw
    if decision.stage is Stage.ENDED:
        new_status = {**old_status, **_pods(view, decision.record)}
        new_status["columns"] = {**_mapping(old_status.get("columns")), **_role_columns(new_status["roles"])}
        return None if new_status == old_status else new_status
    phase = condition_facts.phase_of(view, decision)
    record = decision.record
    new_status = {
        "phase": phase,
        "schemaVersion": view.defaults.version,
        "observedGeneration": view.generation,
        "appliedGeneration": _applied(view),
        "keyId": old_status.get("keyId") or view.config.key_id or None,
        "epoch": record.epoch,
        "begunEpoch": record.begun_epoch or None,
        "restarts": record.restarts,
        "totalRestarts": record.total_restarts,
        "forgiveAtStep": min(record.forgive_at, MOST) if record.forgive_at is not None else None,
        **_runner_progress(view, phase),
        "startTime": _time(record.start_time),
        "completionTime": _time(record.completion_time),
        "suspendedSeconds": record.suspended_seconds or None,
        "runtimeSeconds": old_status.get("runtimeSeconds"),
        **_pods(view, record),
        "ends": pod_failures_status(record.pod_failures) or None,
        "draining": draining_status(draining) or None,
        "halt": suspension_status(record.suspension) if record.suspension is not None else None,
        "conditions": conditions.merge(record.conditions, facts, now=view.now, generation=view.generation),
    }
    new_status["firstStepTime"] = _time(_first_step(view, new_status.get("step")))
    new_status["columns"] = {
        "step": f"{new_status.get('step') or 0}/{new_status['totalSteps']}",
        **_role_columns(new_status["roles"]),
        "reason": condition_facts.phase_reason(facts),
    }
    metrics = {metric["name"]: metric["value"] for metric in new_status.get("metrics") or ()}
    if SUCCESS in metrics:
        new_status["columns"]["success"] = metrics[SUCCESS]
    new_status = {key: value for key, value in new_status.items() if value is not None}
    if new_status == old_status:
        return None
    if record.start_time is not None:
        new_status["runtimeSeconds"] = deadlines.runtime_seconds(record, view.now)
    return new_status


def refuse(
    job: Object, record: Record, facts: Mapping[str, Fact], *, now: float, generation: int
) -> dict[str, Any] | None:
    """Return the status of a job with an invalid spec, which changes only Accepted; None when it is unchanged."""
    merged = {
        c["type"]: c
        for c in conditions.merge(record.conditions, {**_known(record), **facts}, now=now, generation=generation)
    }
    kept_conditions = {
        kind: dict(record.conditions[kind])
        for kind in conditions.TYPES
        if kind in record.conditions and kind not in facts
    }
    new_status = {
        "phase": "Pending",
        "epoch": 0,
        **record.raw,
        "observedGeneration": generation,
        "conditions": [kept_conditions.get(kind) or merged[kind] for kind in conditions.TYPES],
        "columns": {**_mapping(record.raw.get("columns")), "reason": "InvalidSpec"},
    }
    return None if new_status == record.raw else new_status


def is_progress_only(before: Object, after: Object) -> bool:
    """Return whether two statuses differ only in fields of PROGRESS."""
    roles = (_steady_roles(before), _steady_roles(after))
    steady = [{k: v for k, v in status.items() if k not in (*PROGRESS, "roles")} for status in (before, after)]
    return steady[0] == steady[1] and roles[0] == roles[1]


def _steady_roles(status: Object) -> list[dict[str, Any]]:
    roles = status.get("roles")
    return [
        {key: value for key, value in _mapping(role).items() if key not in ("minVersion", "maxVersion")}
        for role in (roles if isinstance(roles, list) else [])
    ]


def _known(record: Record) -> dict[str, Fact]:
    return {
        kind: Fact(status=str(c.get("status")), reason=str(c.get("reason")), message=str(c.get("message", "")))
        for kind, c in record.conditions.items()
        if kind in conditions.TYPES
    }


# --- what the runner reports -------------------------------------------------------------------------------------------


def _runner_progress(view: JobView, phase: str) -> dict[str, Any]:
    """Return the progress fields. Within an epoch, step and version never decrease, even if reports arrive out of order."""
    old_status, report = view.record.raw, view.report
    progress = {
        key: old_status[key]
        for key in ("step", "policyVersion", "reward", "lag", "checkpoint", "metrics", "busy", "devices")
        if key in old_status
    }
    progress["totalSteps"] = view.spec.algorithm.steps
    if report is None or not report.begun:
        return progress
    same_run = view.record.begun and view.record.epoch == view.epoch
    for name in ("step", "policyVersion"):
        new, old = report.count(name), old_status.get(name)
        if new is not None:
            progress[name] = max(new, old) if same_run and isinstance(old, int) else new
    progress["totalSteps"] = report.count("totalSteps") or progress["totalSteps"]
    progress |= (
        {"reward": report.number("reward"), "lag": _lag(view)}
        if report.number("reward") is not None
        else {"lag": _lag(view)}
    )
    reported = {
        "checkpoint": _checkpoint(report),
        "metrics": _metrics(report),
        "busy": _busy(report),
        "devices": _devices(view, report),
    }
    return progress | {key: value for key, value in reported.items() if value}


def _lag(view: JobView) -> int:
    lag = condition_facts.rollout_role(view).get("lag")
    return min(whole_number(lag) or 0, 2**31 - 1)


def _checkpoint(report: Report) -> dict[str, Any]:
    reported = report.mapping("checkpoint")
    checkpoint: dict[str, Any] = {
        key: reported[key]
        for key in ("lastStep", "bestStep", "resumedFrom")
        if whole_number(reported.get(key)) is not None
    }
    if isinstance(reported.get("path"), str) and len(reported["path"]) <= LONGEST_PATH:
        checkpoint["path"] = reported["path"]
    if (seconds := to_seconds(reported.get("time"))) is not None:
        checkpoint["time"] = to_text(seconds)  # Converted, because the runner's own text may be of any length.
    best = finite(reported.get("bestReward"))
    return checkpoint | ({"bestReward": best} if best is not None else {})


def _metrics(report: Report) -> list[dict[str, str]]:
    metrics, workload = report.mapping("metrics"), report.mapping("workload")
    metrics = {**metrics, **{name: workload.get(field) for name, field in SHARES.items()}}
    numbers = ((name, metrics.get(name)) for name in (*METRICS, *SHARES))
    # An integer may be too large for a float.
    finite_numbers = [(name, value) for name, value in numbers if isinstance(value, float) or finite(value) is not None]
    return [{"name": name, "value": f"{value:.6g}"} for name, value in finite_numbers]


def _busy(report: Report) -> list[dict[str, str]]:
    """Return the utilisation of each rollout, in hundredths so that a steady job is not written for less."""
    rollouts = report.mapping("workload").get("rollouts")
    listed = [_mapping(rollout) for rollout in (rollouts if isinstance(rollouts, list) else [])[:MOST_ROLLOUTS]]
    shares = {str(rollout.get("name"))[:LONGEST_NAME]: finite(rollout.get("busy")) for rollout in listed}
    return [
        {"name": name, "value": f"{share:.2f}"}
        for name, share in shares.items()
        if share is not None and 0 <= share <= 1
    ]


def _devices(view: JobView, report: Report) -> list[dict[str, Any]]:
    by_pod: dict[str, set[str]] = {}
    for member in report.members:
        uuids = member.get("deviceUuids")
        if isinstance(uuids, list) and uuids:
            by_pod.setdefault(str(member.get("pod")), set()).update(str(uuid)[:LONGEST_NAME] for uuid in uuids)
    pods = view.pods
    return [
        {"pod": pod, "node": pods[pod].node, "uuids": sorted(uuids)[:DEVICES]}
        for pod, uuids in sorted(by_pod.items())
        if pod in pods
    ]


def _applied(view: JobView) -> Any:
    report = view.report
    # 0 is reported by a runner that has just started and has received no spec yet.
    if report is not None and report.applied_generation:
        return report.applied_generation
    return view.record.raw.get("appliedGeneration")


def _first_step(view: JobView, step: Any) -> float | None:
    recorded = view.record.first_step_time
    return recorded if recorded is not None else view.now if isinstance(step, int) and step > 0 else None


# --- what the pods show ----------------------------------------------------------------------------------------------


def _pods(view: JobView, record: Record) -> dict[str, Any]:
    roles = [_role(view, record, role) for role in view.groups]
    scaled = next(role for role in roles if role["name"] == ROLLOUT)
    return {
        "roles": roles,
        "rollout": {
            "replicas": scaled["active"],
            "readyReplicas": scaled["ready"],
            "selector": naming.group_selector(view.name, ROLLOUT),
        },
    }


def _role(view: JobView, record: Record, group: str) -> dict[str, Any]:
    state = record.role(group)
    pods = [p for p in view.hosts(group) if is_active(p) and (not view.is_gang(p.role) or p.epoch == record.epoch)]
    status: dict[str, Any] = {
        "name": group,
        "desired": view.wanted_indices(group).stop,
        "ready": sum(1 for pod in pods if pod.ready),
        "active": len(pods),
        "failed": state.failed,
        "restarts": state.restarts,
    }
    if state.restart_time is not None:
        status["restartTime"] = _time(state.restart_time)
    return status | (_versions(view) if view.groups[group].pulls_weights else {})


def _versions(view: JobView) -> dict[str, int]:
    versions = condition_facts.rollout_role(view).get("versions")
    numbers = (
        [int(version) for version in versions if str(version).isdecimal() and len(str(version)) < 16]
        if isinstance(versions, Mapping)
        else []
    )
    return {"minVersion": min(numbers), "maxVersion": max(numbers)} if numbers else {}


def _role_columns(roles: list[dict[str, Any]]) -> dict[str, str]:
    counts = {role["name"]: f"{role['ready']}/{role['desired']}" for role in roles}
    return {column: counts[group] for column, group in COLUMNS.items()}


def _time(seconds: float | None) -> str | None:
    return to_text(seconds) if seconds is not None else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
