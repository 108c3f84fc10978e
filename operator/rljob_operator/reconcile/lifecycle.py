"""Decides the next stage of a job's life. The conditions are checked in this order; the first one that holds decides:

    ended -> stays ended | actor-0 done -> Succeeded | suspended or paused -> checkpoint, then no pods
    resumed -> new epoch | deadline, failure -> Failed, new epoch, or pods replaced | else -> run

The epoch is the number of gang restarts of a job, counted from 1. It is a fencing token: pods, calls and reports of an older epoch are
ignored.

A decision that raises the epoch or ends the job is only written to the status; the next reconcile acts on what is written. An operator that
crashes in between therefore finds in the status what has to be done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from rl_core.plan.failure_rules import PodFailures, add_failure
from rljob_operator.reconcile import deadlines, failures
from rljob_operator.reconcile.failures import Act, Finding
from rljob_operator.reconcile.job_view import JobView, has_ended, is_active
from rljob_operator.reconcile.record import GANG, Record, RoleRecord, Suspension
from rljob_operator.reconcile.report import whole_number

Outcome = Literal["Succeeded", "Failed"]


class Stage(Enum):
    """What a reconcile does for the job: RUN, RESTART, SUSPENDING, SUSPENDED, END or ENDED."""

    RUN = "run"
    """Create missing pods and remove surplus ones."""
    RESTART = "restart"
    """Write the new epoch to the status, nothing else."""
    SUSPENDING = "suspending"
    """Let the runner save, then delete all pods."""
    SUSPENDED = "suspended"
    """Keep the job without pods."""
    END = "end"
    """Write the result to the status, nothing else."""
    ENDED = "ended"
    """Delete pods and the job as deletionPolicy and ttlSecondsAfterFinished say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The stage of one reconcile, the record to write, and the reasons."""

    stage: Stage
    record: Record
    """The counters and timestamps to write to the status."""
    reason: str = ""
    """Reason of the condition that reports the decision; empty when nothing changed."""
    message: str = ""
    outcome: Outcome | None = None
    """Result of the job, for END; None otherwise."""
    roll_back: bool = False
    """For RESTART: whether the runner must not save a checkpoint before it ends."""
    findings: tuple[Finding, ...] = ()
    """Detected failures, for events and for the condition Degraded."""


def decide(view: JobView) -> Decision:
    """Return the decision for the job as it is now."""
    record = view.record
    if record.terminal:
        return Decision(stage=Stage.ENDED, record=record)
    suspension = record.suspension
    if failures.completed(view) and suspension is None:
        return _end(view, record, "Succeeded", "TrainingFinished", "actor-0 exited with code 0")
    if view.spec.suspend:
        since = suspension.since if suspension is not None else view.now
        return _suspend(view, record, Suspension(since=since, done=suspension is not None and suspension.done))
    if suspension is not None:
        return _suspend(view, record, suspension) if suspension.rule else _resume(view, suspension)
    record = replace(record, start_time=record.start_time or view.now)
    if view.epoch == 0:
        return Decision(stage=Stage.RUN, record=replace(record, epoch=1))
    begun_epoch = view.epoch if view.report is not None and view.report.begun else record.begun_epoch
    record = replace(record, epoch=view.epoch, begun_epoch=begun_epoch)
    if overdue := deadlines.overdue(view):
        return _end(view, record, "Failed", "DeadlineExceeded", overdue)
    verdict = failures.judge(view)
    gravest = verdict.gravest
    record = replace(verdict.record, start_time=record.start_time, epoch=record.epoch, begun_epoch=begun_epoch)
    for finding in verdict.findings:
        record = _mark_role(view, record, finding.role) if finding.act is Act.RESTART_ROLE else record
    decision = Decision(stage=Stage.RUN, record=record, findings=verdict.findings)
    if gravest is not None:
        return _act_on(view, decision, gravest)
    return _resize(view, decision) if _surplus(view) else decision


def _act_on(view: JobView, decision: Decision, finding: Finding) -> Decision:
    """Return the decision for the most severe finding."""
    record = decision.record
    if finding.act is Act.FAIL:
        return replace(_end(view, record, "Failed", finding.reason, finding.message), findings=decision.findings)
    if finding.act is Act.PAUSE:
        suspension = Suspension(rule=finding.reason, since=view.now, message=finding.message)
        return replace(_suspend(view, record, suspension), message=suspension.explanation, findings=decision.findings)
    if finding.act in (Act.RESTART_JOB, Act.ROLL_BACK):
        return _restart(view, decision, finding)
    return decision


def _restart(view: JobView, decision: Decision, finding: Finding) -> Decision:
    record, limit = decision.record, view.spec.failure_policy.max_restarts
    if finding.counted and record.restarts >= limit:
        text = f"{finding.message}; all {limit} restarts of failurePolicy.maxRestarts are used"
        return replace(_end(view, record, "Failed", "MaxRestartsExceeded", text), findings=decision.findings)
    record = failures.count_restarts(view, record, restarts=1) if finding.counted else record
    gang = add_failure(record.pod_failures.get(GANG) or PodFailures(), view.now)
    roles = {group: _restarted(view, record, group) for group in view.gangs}
    record = replace(
        record,
        total_restarts=record.total_restarts + 1,
        roles={**record.roles, **roles},
        pod_failures={**record.pod_failures, GANG: gang},
    )
    description = f"restart {record.restarts} of {limit}" if finding.counted else "restart, not counted"
    return replace(
        decision,
        stage=Stage.RESTART,
        record=_next_epoch(view, record),
        reason=finding.reason,
        message=f"{description}, attempt {view.epoch + 1}: {finding.message}",
        roll_back=finding.act is Act.ROLL_BACK,
    )


def _restarted(view: JobView, record: Record, group: str) -> RoleRecord:
    """Return the counters of a gang after one more restart."""
    state = record.role(group)
    failed = sum(1 for pod in view.pods_of(group) if has_ended(pod) and not pod.disrupted)
    return replace(state, restarts=state.restarts + 1, failed=state.failed + failed)


def _next_epoch(view: JobView, record: Record) -> Record:
    return replace(record, epoch=max(view.epoch, record.epoch) + 1)


def _mark_role(view: JobView, record: Record, role: str) -> Record:
    """Return the record that requests the replacement of all present pods of a role.

    Pods created at or before `restart_time` are replaced. It is the newest creation time of these pods, by the clock of the API server. The
    operator's clock might be fast, so that the replacements would be replaced as well.
    """
    pods = view.pods_of(role)
    state = record.role(role)
    restart_time = max((pod.created for pod in pods), default=state.restart_time)
    active = sum(1 for pod in pods if is_active(pod))
    return replace(
        record,
        roles={**record.roles, role: replace(state, restart_time=restart_time, restarts=state.restarts + active)},
    )


# --- suspension ----------------------------------------------------------------------------------------------------


def _suspend(view: JobView, record: Record, suspension: Suspension) -> Decision:
    """Return the decision to suspend: SUSPENDING while there are pods, which are deleted once actor-0 has saved, then SUSPENDED."""
    record = replace(record, epoch=view.epoch, draining={})
    runner_pod, report = view.first_actor, view.report
    if suspension.rule and runner_pod is not None and has_ended(runner_pod) and report is not None:
        suspension = replace(suspension, last_good_step=whole_number(report.mapping("checkpoint").get("lastStep")))
    if view.pods:
        return Decision(stage=Stage.SUSPENDING, record=replace(record, suspension=replace(suspension, done=False)))
    finished = suspension if suspension.done else replace(suspension, done=True, since=view.now)
    return Decision(stage=Stage.SUSPENDED, record=replace(_without_pods(record), suspension=finished))


def seconds_to_save(view: JobView, record: Record) -> float:
    """Return the seconds that the runner of a job being suspended still has to save a checkpoint; 0 means that its pods are deleted now."""
    runner_pod, suspension = view.first_actor, record.suspension
    if (
        suspension is None
        or runner_pod is None
        or has_ended(runner_pod)
        or not runner_pod.ip
        or not _has_work(view, record)
    ):
        return 0.0
    return max(suspension.since + view.spec.runtime.suspend_seconds - view.now, 0.0)


def _has_work(view: JobView, record: Record) -> bool:
    """Return whether the runner may have finished a step in this epoch; otherwise there is nothing to save."""
    return record.begun and (record.first_step_time is not None or view.step > 0)


def _without_pods(record: Record) -> Record:
    """Return the record of a job without pods: active pods and requested restarts are reset; attempts and stall actions are kept."""
    roles = {name: replace(role, active=0, restart_time=None) for name, role in record.roles.items()}
    return replace(record, roles=roles)


def _resume(view: JobView, suspension: Suspension) -> Decision:
    record = view.record
    suspended = int(view.now - suspension.since) if record.start_time is not None else 0
    record = replace(
        record,
        start_time=record.start_time or view.now,
        suspended_seconds=record.suspended_seconds + max(suspended, 0),
        suspension=None,
    )
    record = _replaced(view, record)
    return Decision(
        stage=Stage.RESTART,
        record=replace(record, roles=_all_idle(view, record)),
        reason="Resumed",
        message=f"resumes as attempt {record.epoch}",
    )


def _replaced(view: JobView, record: Record) -> Record:
    """Return the record under which no present pod stays: its template may be older than the spec, edited while the job was suspended."""
    for group in view.elastic:
        record = _mark_role(view, record, group)
    return _next_epoch(view, record)


def _surplus(view: JobView) -> list[str]:
    """Return the names of pods of this epoch that their gang has no place for."""
    return [
        pod.name for group in view.gangs for pod in view.pods_of(group) if pod.index not in view.wanted_indices(group)
    ]


def _resize(view: JobView, decision: Decision) -> Decision:
    """Restart the gang of a job whose spec now asks for fewer pods of it, without the pods that are no longer wanted.

    The API server accepts such a change only while the job is suspended. A job that runs was therefore suspended, changed and resumed
    between two reconciliations.
    """
    record = _replaced(view, decision.record)
    return replace(
        decision,
        stage=Stage.RESTART,
        record=record,
        reason="Resumed",
        message=f"resumes as attempt {record.epoch} without {', '.join(_surplus(view))}, which the spec does not ask for any more",
    )


def _all_idle(view: JobView, record: Record) -> dict[str, RoleRecord]:
    return {name: replace(role, active=0) for name, role in record.roles.items() if name in view.groups}


def _end(view: JobView, record: Record, outcome: Outcome, reason: str, message: str) -> Decision:
    record = replace(
        record,
        epoch=max(record.epoch, view.epoch),
        start_time=record.start_time or view.now,
        completion_time=view.now,
        draining={},
    )
    return Decision(stage=Stage.END, record=record, outcome=outcome, reason=reason, message=message)
