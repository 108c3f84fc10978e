"""`reconcile`: from a job, what is there, and the time, to what is to be done. Pure and total.

    parse -> look -> decide -> moves of pods -> facts -> status, events -> Plan

Called by the controller with the cache's view; nothing here reads a clock, the network or a disk. A job that cannot be understood
gives Accepted=False and no moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.api import document
from rl_core.api.job import MANAGER
from rl_core.plan.launch import build_launch_plan
from rljob_operator import manifests
from rljob_operator.model import ControlCall, Deletion, Object, Observed, OperatorConfig, Plan
from rljob_operator.reconcile import (
    autoscaling,
    cleanup,
    condition_facts,
    deadlines,
    lifecycle,
    notes,
    parsing,
    scaling,
    situation,
    storage,
)
from rljob_operator.reconcile import record as records
from rljob_operator.reconcile import status as statuses
from rljob_operator.reconcile.conditions import Fact
from rljob_operator.reconcile.lifecycle import Course, Stage
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.reconcile.scaling import PodMoves
from rljob_operator.reconcile.situation import Situation, is_active
from rljob_operator.reconcile.storage import Obstacle

OBSTACLE_SECONDS = 15.0
"""Seconds until a job that waits for a name or a claim is looked at again: those are not watched."""
EARLIER_SECONDS = 2.0
"""The same, for pods of an earlier job of the name."""


def reconcile(
    job: Object, observed: Observed, now: float, *, config: OperatorConfig, known: ParsedJob | None = None
) -> Plan:
    """Return what to do now for `job`, the API object; `now` in seconds since 1970.

    `known` makes the next look at the same job quicker (parsing.ParsedJob); None = each look parses anew.
    """
    meta, spec = _mapping(job.get("metadata")), _mapping(job.get("spec"))
    if meta.get("deletionTimestamp") is not None or spec.get("managedBy") not in (None, MANAGER):
        return Plan()
    known = ParsedJob() if known is None else known
    parsed = parsing.parse(job, observed.defaults, known)
    if isinstance(parsed, str):
        return _refuse(job, parsed, now)
    return _plan(situation.look(parsed, job, observed, now, defaults=known.defaults, config=config), known)


def _plan(situation: Situation, known: ParsedJob) -> Plan:
    course = lifecycle.decide(situation)
    obstacle = storage.obstacle(situation) if course.stage is not Stage.ENDED else None
    moves = _moves(situation, course, obstacle)
    facts: Mapping[str, Fact] = (
        condition_facts.facts(situation, course, obstacle) if course.stage is not Stage.ENDED else {}
    )
    status = statuses.build(situation, course, facts, moves.draining)
    return Plan(
        status=status,
        progress_only=status is not None and statuses.is_progress_only(situation.record.raw, status),
        delete=(*moves.delete, *_old_templates(situation, course, obstacle, known)),
        ensure=_support(situation, course, obstacle, known),
        ensure_secret=course.stage is Stage.RUN and obstacle is None and not situation.earlier,
        create=_build(situation, course, moves.create),
        calls=(*moves.calls, *_control(situation, course)),
        events=notes.tell(situation.record, course, facts, status),
        scale=autoscaling.wanted(situation, course, moves),
        requeue_after=_again(situation, course, moves, obstacle),
    )


def _moves(situation: Situation, course: Course, obstacle: Obstacle | None) -> PodMoves:
    """Return the moves of pods. A new epoch or an end is written alone: what it means for pods, the next reconcile sees."""
    if course.stage is Stage.RUN:
        free = obstacle is None and not situation.earlier
        return scaling.run(situation, course.record, may_create=free)
    if course.stage is Stage.HALT:
        return cleanup.halt(situation, course.record)
    if course.stage is Stage.ENDED:
        return cleanup.ended(situation)
    if course.roll_back:
        return PodMoves(draining={}, calls=cleanup.finish(situation, "rollback"))
    return PodMoves(draining=dict(course.record.draining) if course.stage is Stage.RESTART else {})


def _support(situation: Situation, course: Course, obstacle: Obstacle | None, known: ParsedJob) -> tuple[Object, ...]:
    """Return the Service, ConfigMap and the like to write; they stay while the job exists, so that what runs keeps its name and fence."""
    if course.stage is not Stage.RUN or obstacle is not None or situation.earlier:
        return ()
    return parsing.missing_objects(situation.job, situation.observed.objects, config=situation.config, known=known)


def _old_templates(
    situation: Situation, course: Course, obstacle: Obstacle | None, known: ParsedJob
) -> tuple[Deletion, ...]:
    """Return the claim templates to delete; a pod that is not bound yet may still need the one it names."""
    unbound = any(not pod.scheduled for pod in situation.pods.values())
    if course.stage is not Stage.RUN or obstacle is not None or situation.earlier or unbound:
        return ()
    return parsing.old_templates(situation.job, situation.observed.objects, config=situation.config, known=known)


def _build(situation: Situation, course: Course, wanted: tuple[tuple[str, int], ...]) -> tuple[Object, ...]:
    """Return the manifests of the pods to make."""
    if not wanted:
        return ()
    meta, record = situation.job.metadata, course.record
    plan = build_launch_plan(
        situation.job,
        name=meta.name,
        namespace=meta.namespace or "default",
        uid=meta.uid or "",
        epoch=record.epoch,
        attempts={role: record.role(role).restarts for role in scaling.ELASTIC},
    )
    pods = {(pod.role, pod.index): pod for pod in plan.pods}
    return tuple(manifests.pods.build(situation.job, pods[key], config=situation.config) for key in wanted)


def _control(situation: Situation, course: Course) -> tuple[ControlCall, ...]:
    """Return the call that tells the runner of a changed spec."""
    report, first = situation.report, situation.first_actor
    if course.stage is not Stage.RUN or report is None or first is None or not first.ip or not is_active(first):
        return ()
    progress, applied = situation.observed.progress, report.applied_generation
    if applied is None or applied >= situation.generation or progress is None or progress.error:
        return ()
    spec = document.write(situation.spec, situation.defaults.table)
    body = {"generation": situation.generation, "spec": spec}
    return (ControlCall(method="PUT /control", body=body, ip=first.ip, epoch=first.epoch),)


def _again(situation: Situation, course: Course, moves: PodMoves, obstacle: Obstacle | None) -> float | None:
    if course.stage in (Stage.RESTART, Stage.END):
        return 0.0
    times = list(moves.again)
    if course.stage is Stage.RUN:
        times += [OBSTACLE_SECONDS] if obstacle is not None else []
        times += [EARLIER_SECONDS] if situation.earlier else []
        due = deadlines.until_overdue(situation)
        times += [due] if due is not None else []
        times += _until_unreachable(situation)
    return max(min(times), 0.0) if times else None


def _until_unreachable(situation: Situation) -> list[float]:
    progress = situation.observed.progress
    if progress is None or progress.failing_since is None:
        return []
    left = progress.failing_since + condition_facts.UNREACHABLE_SECONDS - situation.now
    return [left] if left > 0 else []


def _refuse(job: Object, problem: str, now: float) -> Plan:
    """A spec this operator cannot read: say so, and leave alone what runs. What has ended goes when its time is up."""
    record, meta = records.read(job.get("status")), _mapping(job.get("metadata"))
    if record.terminal:
        given = _mapping(job.get("spec")).get("ttlSecondsAfterFinished")
        ttl = deadlines.until_deleted(record, given if type(given) is int else None, now)
        gone = (cleanup.whole_job(str(meta.get("name", "")), str(meta.get("uid", ""))),) if ttl == 0.0 else ()
        return Plan(delete=gone, requeue_after=ttl or None)
    generation = meta.get("generation")
    facts = condition_facts.refused(problem, record.conditions)
    status = statuses.refuse(job, record, facts, now=now, generation=generation if isinstance(generation, int) else 0)
    new = record.condition("Accepted")[1:] != ("InvalidSpec", problem)
    return Plan(status=status, events=notes.refusal(problem) if new else ())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
