"""`reconcile`: returns the plan for a job from the observed objects and the time. Pure; it has a result for every input.

    parse -> view -> decide -> changes to pods -> conditions -> status, events -> Plan

Called by the controller with the cache's view; nothing here reads a clock, the network or a disk. A job that cannot be understood
gives Accepted=False and no changes to pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_core.api import document
from rl_core.api.job import MANAGER, RLJobSpec
from rl_core.plan.groups import Group, groups_of
from rl_core.plan.launch import build_launch_plan
from rljob_operator import manifests
from rljob_operator.model import ControlCall, Deletion, Object, Observed, OperatorConfig, Plan
from rljob_operator.reconcile import (
    autoscaling,
    cleanup,
    condition_facts,
    deadlines,
    events,
    job_view,
    lifecycle,
    obstacles,
    parsing,
    scaling,
)
from rljob_operator.reconcile import record as records
from rljob_operator.reconcile import status as statuses
from rljob_operator.reconcile.conditions import Fact
from rljob_operator.reconcile.job_view import JobView, is_active
from rljob_operator.reconcile.lifecycle import Decision, Stage
from rljob_operator.reconcile.obstacles import Obstacle
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.reconcile.scaling import PodMoves

Groups = Callable[[RLJobSpec], Mapping[str, Group]]
"""Returns the groups of a job by name."""
OBSTACLE_SECONDS = 15.0
"""Seconds until a job that waits for a name or a claim is reconciled again, because these are not watched."""
PREVIOUS_JOB_SECONDS = 2.0
"""The same, for pods of an earlier job of the name."""


def reconcile(
    job: Object,
    observed: Observed,
    now: float,
    *,
    config: OperatorConfig,
    known: ParsedJob | None = None,
    groups: Groups = groups_of,
) -> Plan:
    """Return what to do now for `job`, the API object; `now` in seconds since 1970.

    `known` caches the parsed spec between calls for the same job (None: the spec is parsed anew). `groups` describes the groups of a job.
    """
    meta, spec = _mapping(job.get("metadata")), _mapping(job.get("spec"))
    if meta.get("deletionTimestamp") is not None or spec.get("managedBy") not in (None, MANAGER):
        return Plan()
    known = ParsedJob() if known is None else known
    parsed = parsing.parse(job, observed.defaults, known)
    if isinstance(parsed, str):
        return _refuse(job, parsed, now)
    return _plan(
        job_view.build(parsed, job, observed, now, defaults=known.defaults, config=config, groups=groups(parsed.spec)),
        known,
    )


def _plan(view: JobView, parsed: ParsedJob) -> Plan:
    decision = lifecycle.decide(view)
    obstacle = obstacles.obstacle(view) if decision.stage is not Stage.ENDED else None
    moves = _moves(view, decision, obstacle)
    facts: Mapping[str, Fact] = (
        condition_facts.facts(view, decision, obstacle) if decision.stage is not Stage.ENDED else {}
    )
    status = statuses.build(view, decision, facts, moves.draining)
    return Plan(
        status=status,
        progress_only=status is not None and statuses.is_progress_only(view.record.raw, status),
        delete=(*moves.delete, *_old_templates(view, decision, obstacle, parsed)),
        ensure=_support(view, decision, obstacle, parsed),
        ensure_secret=decision.stage is Stage.RUN and obstacle is None and not view.previous_pods,
        create=_build(view, decision, moves.create),
        calls=(*moves.calls, *_control(view, decision)),
        events=events.of_transition(view.record, decision, facts, status),
        scale=autoscaling.wanted(view, decision, moves),
        requeue_after=_again(view, decision, moves, obstacle),
    )


def _moves(view: JobView, decision: Decision, obstacle: Obstacle | None) -> PodMoves:
    """Return the changes to the pods; none with a new epoch or an end, because the next reconcile acts on what is written."""
    if decision.stage is Stage.RUN:
        free = obstacle is None and not view.previous_pods
        return scaling.run(view, decision.record, may_create=free)
    if decision.stage is Stage.SUSPENDING:
        return cleanup.suspend(view, decision.record)
    if decision.stage is Stage.ENDED:
        return cleanup.ended(view)
    if decision.roll_back:
        return PodMoves(draining={}, calls=cleanup.finish(view, "rollback"))
    return PodMoves(draining=dict(decision.record.draining) if decision.stage is Stage.RESTART else {})


def _support(view: JobView, decision: Decision, obstacle: Obstacle | None, parsed: ParsedJob) -> tuple[Object, ...]:
    """Return the supporting objects to write. They stay while the job exists, so that pods keep their DNS names and network policies."""
    if decision.stage is not Stage.RUN or obstacle is not None or view.previous_pods:
        return ()
    return parsing.missing_objects(
        view.job, view.observed.objects, config=view.config, known=parsed, groups=view.groups
    )


def _old_templates(
    view: JobView, decision: Decision, obstacle: Obstacle | None, parsed: ParsedJob
) -> tuple[Deletion, ...]:
    """Return the claim templates to delete; a pod that is not bound yet may still need the one it names."""
    unbound = any(not pod.scheduled for pod in view.pods.values())
    if decision.stage is not Stage.RUN or obstacle is not None or view.previous_pods or unbound:
        return ()
    return parsing.old_templates(view.job, view.observed.objects, config=view.config, known=parsed, groups=view.groups)


def _build(view: JobView, decision: Decision, names: tuple[tuple[str, int], ...]) -> tuple[Object, ...]:
    """Return the Kubernetes Pod objects that this reconcile creates: those of the pods (role, index) in `names`."""
    if not names:
        return ()
    meta, record = view.job.metadata, decision.record
    plan = build_launch_plan(
        view.job,
        name=meta.name,
        namespace=meta.namespace or "default",
        uid=meta.uid or "",
        epoch=record.epoch,
        attempts={group: record.role(group).restarts for group in view.elastic},
        groups=view.groups,
    )
    pods = {(pod.role, pod.index): pod for pod in plan.pods}
    return tuple(manifests.pods.build(view.job, pods[key], config=view.config, groups=view.groups) for key in names)


def _control(view: JobView, decision: Decision) -> tuple[ControlCall, ...]:
    """Return the call that tells the runner of a changed spec."""
    report, runner_pod = view.report, view.first_actor
    if (
        decision.stage is not Stage.RUN
        or report is None
        or runner_pod is None
        or not runner_pod.ip
        or not is_active(runner_pod)
    ):
        return ()
    progress, applied = view.observed.progress, report.applied_generation
    if applied is None or applied >= view.generation or progress is None or progress.error:
        return ()
    spec = document.write(view.spec, view.defaults.table)
    body = {"generation": view.generation, "spec": spec}
    return (ControlCall(method="PUT /control", body=body, ip=runner_pod.ip, epoch=runner_pod.epoch),)


def _again(view: JobView, decision: Decision, moves: PodMoves, obstacle: Obstacle | None) -> float | None:
    if decision.stage in (Stage.RESTART, Stage.END):
        return 0.0
    times = list(moves.again)
    if decision.stage is Stage.RUN:
        times += [OBSTACLE_SECONDS] if obstacle is not None else []
        times += [PREVIOUS_JOB_SECONDS] if view.previous_pods else []
        overdue = deadlines.until_overdue(view)
        times += [overdue] if overdue is not None else []
        times += _until_unreachable(view)
    return max(min(times), 0.0) if times else None


def _until_unreachable(view: JobView) -> list[float]:
    progress = view.observed.progress
    if progress is None or progress.failing_since is None:
        return []
    remaining = progress.failing_since + condition_facts.UNREACHABLE_SECONDS - view.now
    return [remaining] if remaining > 0 else []


def _refuse(job: Object, problem: str, now: float) -> Plan:
    """Return the plan for a spec that this operator cannot read. Running pods stay; an ended job is deleted after its TTL."""
    record, meta = records.read(job.get("status")), _mapping(job.get("metadata"))
    if record.terminal:
        ttl_field = _mapping(job.get("spec")).get("ttlSecondsAfterFinished")
        ttl = deadlines.until_deleted(record, ttl_field if type(ttl_field) is int else None, now)
        deletion = (cleanup.whole_job(str(meta.get("name", "")), str(meta.get("uid", ""))),) if ttl == 0.0 else ()
        return Plan(delete=deletion, requeue_after=ttl or None)
    generation = meta.get("generation")
    facts = condition_facts.invalid_spec_facts(problem, record.conditions)
    status = statuses.refuse(job, record, facts, now=now, generation=generation if isinstance(generation, int) else 0)
    new = record.condition("Accepted")[1:] != ("InvalidSpec", problem)
    return Plan(status=status, events=events.of_refused_spec(problem) if new else ())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
