"""Where a job is in its life and what comes next: the decisions, in the order in which they win.

    ended -> stays ended | actor-0 done -> Succeeded | suspended or paused -> checkpoint, then no pods
    resumed -> new epoch | deadline, failure -> Failed, new epoch, or pods replaced | else -> run

A decision that raises the epoch or ends the job is an intent: it is written alone, and the next reconcile acts on what is written. So
an operator that dies in between, at any point, finds in the status what it was about to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from rl_core.plan.failure_rules import Ends, after_end
from rljob_operator.reconcile import deadlines, failures
from rljob_operator.reconcile.failures import Act, Finding
from rljob_operator.reconcile.record import GANG, Halt, Record, RoleRecord
from rljob_operator.reconcile.report import whole
from rljob_operator.reconcile.situation import ROLES, Situation, has_ended, is_active

Outcome = Literal["Succeeded", "Failed"]


class Stage(Enum):
    """What a reconcile does."""

    RUN = "run"
    """Keep the wanted pods there."""
    RESTART = "restart"
    """Write a new epoch, nothing else."""
    HALT = "halt"
    """Let the runner save, then delete all pods."""
    HALTED = "halted"
    """No pods."""
    END = "end"
    """Write the end, nothing else."""
    ENDED = "ended"
    """Clean up as deletionPolicy and TTL say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A decision."""

    stage: Stage
    record: Record
    """What is to be remembered from now on."""
    reason: str = ""
    """Why, for the condition that tells of it; empty when nothing new happened."""
    message: str = ""
    outcome: Outcome | None = None
    """For END."""
    roll_back: bool = False
    """For RESTART: the runner must not save."""
    findings: tuple[Finding, ...] = ()
    """What went wrong, for events and for Degraded."""


def decide(situation: Situation) -> Course:
    """Return what comes next."""
    record = situation.record
    if record.terminal:
        return Course(stage=Stage.ENDED, record=record)
    halt = record.halt
    if failures.completed(situation) and halt is None:
        return _end(situation, record, "Succeeded", "TrainingFinished", "actor-0 ended with code 0")
    if situation.spec.suspend:
        since = halt.since if halt is not None else situation.now
        return _halt(situation, record, Halt(since=since, done=halt is not None and halt.done))
    if halt is not None:
        return _halt(situation, record, halt) if halt.rule else _resume(situation, halt)
    record = replace(record, start_time=record.start_time or situation.now)
    if situation.epoch == 0:
        return Course(stage=Stage.RUN, record=replace(record, epoch=1))
    begun = situation.epoch if situation.report is not None and situation.report.begun else record.begun_epoch
    record = replace(record, epoch=situation.epoch, begun_epoch=begun)
    if overdue := deadlines.overdue(situation):
        return _end(situation, record, "Failed", "DeadlineExceeded", overdue)
    verdict = failures.judge(situation)
    gravest = verdict.gravest
    record = replace(verdict.record, start_time=record.start_time, epoch=record.epoch, begun_epoch=begun)
    for finding in verdict.findings:
        record = _mark_role(situation, record, finding.role) if finding.act is Act.RESTART_ROLE else record
    course = Course(stage=Stage.RUN, record=record, findings=verdict.findings)
    return _act_on(situation, course, gravest) if gravest is not None else course


def _act_on(situation: Situation, course: Course, finding: Finding) -> Course:
    """Return the course after the gravest finding."""
    record = course.record
    if finding.act is Act.FAIL:
        return replace(_end(situation, record, "Failed", finding.reason, finding.message), findings=course.findings)
    if finding.act is Act.PAUSE:
        halt = Halt(rule=finding.reason, since=situation.now, message=finding.message)
        return replace(_halt(situation, record, halt), message=halt.words, findings=course.findings)
    if finding.act in (Act.RESTART_JOB, Act.ROLL_BACK):
        return _restart(situation, course, finding)
    return course


def _restart(situation: Situation, course: Course, finding: Finding) -> Course:
    record, limit = course.record, situation.spec.failure_policy.max_restarts
    if finding.counted and record.restarts >= limit:
        text = f"{finding.message}; all {limit} restarts of failurePolicy.maxRestarts are used up"
        return replace(_end(situation, record, "Failed", "MaxRestartsExceeded", text), findings=course.findings)
    record = failures.charged(situation, record, restarts=1) if finding.counted else record
    gang, actor = after_end(record.ends.get(GANG) or Ends(), situation.now), record.role("actor")
    actor = replace(actor, restarts=actor.restarts + 1, failed=actor.failed + _num_failed(situation))
    record = replace(
        record,
        total_restarts=record.total_restarts + 1,
        roles={**record.roles, "actor": actor},
        ends={**record.ends, GANG: gang},
    )
    how = f"restart {record.restarts} of {limit}" if finding.counted else "restart, not counted"
    return replace(
        course,
        stage=Stage.RESTART,
        record=_next_epoch(situation, record),
        reason=finding.reason,
        message=f"{how}, epoch {situation.epoch + 1}: {finding.message}",
        roll_back=finding.act is Act.ROLL_BACK,
    )


def _num_failed(situation: Situation) -> int:
    return sum(1 for pod in situation.pods_of("actor") if has_ended(pod) and not pod.disrupted)


def _next_epoch(situation: Situation, record: Record) -> Record:
    return replace(record, epoch=max(situation.epoch, record.epoch) + 1)


def _mark_role(situation: Situation, record: Record, role: str) -> Record:
    """Return the record that asks for all present pods of a role to be replaced.

    The mark is a creation time, by the API server's clock: by ours, should it run fast, the replacements would be older than it too.
    """
    pods = situation.pods_of(role)
    known = record.role(role)
    mark = max((pod.created for pod in pods), default=known.restart_time)
    fresh = sum(1 for pod in pods if is_active(pod))
    return replace(
        record, roles={**record.roles, role: replace(known, restart_time=mark, restarts=known.restarts + fresh)}
    )


# --- suspension ----------------------------------------------------------------------------------------------------


def _halt(situation: Situation, record: Record, halt: Halt) -> Course:
    """Save, then delete: until actor-0 has ended, or its time is up, the others stay too."""
    record = replace(record, epoch=situation.epoch, draining={})
    first, report = situation.first_actor, situation.report
    if halt.rule and first is not None and has_ended(first) and report is not None:
        halt = replace(halt, last_good_step=whole(report.mapping("checkpoint").get("lastStep")))
    if situation.pods:
        return Course(stage=Stage.HALT, record=replace(record, halt=replace(halt, done=False)))
    done = halt if halt.done else replace(halt, done=True, since=situation.now)
    return Course(stage=Stage.HALTED, record=replace(_without_pods(record), halt=done))


def seconds_to_save(situation: Situation, record: Record) -> float:
    """Return how long the runner of a job that is suspended may still take to save; 0 = its pods go now."""
    first, halt = situation.first_actor, record.halt
    if halt is None or first is None or has_ended(first) or not first.ip or not _has_work(situation, record):
        return 0.0
    return max(halt.since + situation.spec.runtime.suspend_seconds - situation.now, 0.0)


def _has_work(situation: Situation, record: Record) -> bool:
    """Return whether the runner may have finished a step since it began: only then is there something to save."""
    return record.begun and (record.first_step_time is not None or situation.step > 0)


def _without_pods(record: Record) -> Record:
    """Nothing of what ended before a suspension matters after it, but the attempts and the acts on stalls."""
    roles = {name: replace(role, active=0, restart_time=None) for name, role in record.roles.items()}
    return replace(record, roles=roles)


def _resume(situation: Situation, halt: Halt) -> Course:
    record = situation.record
    asleep = int(situation.now - halt.since) if record.start_time is not None else 0
    record = replace(
        record,
        start_time=record.start_time or situation.now,
        suspended_seconds=record.suspended_seconds + max(asleep, 0),
        halt=None,
    )
    epoch = max(situation.epoch, record.epoch) + 1
    return Course(
        stage=Stage.RESTART,
        record=replace(record, epoch=epoch, roles=_all_idle(record.roles.items())),
        reason="Resumed",
        message=f"resumed under epoch {epoch}",
    )


def _all_idle(roles: Iterable[tuple[str, RoleRecord]]) -> dict[str, RoleRecord]:
    return {name: replace(role, active=0) for name, role in roles if name in ROLES}


def _end(situation: Situation, record: Record, outcome: Outcome, reason: str, message: str) -> Course:
    record = replace(
        record,
        epoch=max(record.epoch, situation.epoch),
        start_time=record.start_time or situation.now,
        completion_time=situation.now,
        draining={},
    )
    return Course(stage=Stage.END, record=record, outcome=outcome, reason=reason, message=message)
