"""Which pods to create and delete while a job runs: the gang of the current epoch, and the desired number of elastic pods.

Pod names are deterministic. A replacement is created after the previous pod of the name is deleted and its back-off is over. Surplus
pods finish their work before they are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_core.plan.failure_rules import PodFailures
from rl_core.plan.groups import CONTROL_GROUP
from rljob_operator.model import ControlCall, Deletion, PodView
from rljob_operator.reconcile.job_view import JobView, has_ended, is_active
from rljob_operator.reconcile.record import GANG, Record
from rljob_operator.reconcile.report import Report

GANG_GRACE = 10
"""Grace period in seconds for pods of an incomplete gang, which cannot save a checkpoint."""
STUCK_SECONDS = 15.0
"""Seconds after its deletion deadline until a pod on a dead node is deleted by force."""
DRAIN_MARGIN = 10.0
"""Seconds beyond runtime.drainSeconds until a draining pod is deleted anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodMoves:
    """The changes to the pods in one reconcile."""

    delete: tuple[Deletion, ...] = ()
    create: tuple[tuple[str, int], ...] = ()
    """(group, index) of the pods to create."""
    calls: tuple[ControlCall, ...] = ()
    draining: Mapping[str, float]
    """Draining pods, and the times at which their drain began."""
    again: tuple[float, ...] = ()
    """Seconds until the next reconcile, for each reason to have one."""


def run(view: JobView, record: Record, *, may_create: bool) -> PodMoves:
    """Return the changes that lead to the desired pods."""
    moves = _drain(view, record)
    delete = {deletion.name: deletion for deletion in (*_teardown(view), *_used_up(view, record), *moves.delete)}
    requeue_times = list(moves.again)
    for pod in (*view.pods.values(), *view.previous):
        forced, wait = forced_deletion(pod, view.now)
        if forced is not None:
            delete[pod.name] = forced
        requeue_times += [] if wait is None else [wait]
    create, pauses = _missing(view, record) if may_create else ([], [])
    return replace(
        moves,
        delete=tuple(delete[name] for name in sorted(delete)),
        create=tuple(create),
        again=(*requeue_times, *pauses),
    )


def forced_deletion(pod: PodView, now: float) -> tuple[Deletion | None, float | None]:
    """Return the forced deletion of a pod on a dead node, or the seconds until it is due.

    Both are None for a pod that needs none; at most one of them is set.
    """
    unseen = not pod.acknowledged and bool(pod.node)
    if not pod.deleting or pod.deletion_deadline is None or not (pod.node_lost or unseen):
        return None, None
    remaining = pod.deletion_deadline + STUCK_SECONDS - now
    if remaining > 0:
        return None, remaining
    return Deletion(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=0), None


def removal(pod: PodView, *, grace: int | None = None) -> Deletion:
    """Return the deletion of a pod."""
    return Deletion(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=grace)


def _teardown(view: JobView) -> list[Deletion]:
    """Delete the gangs of previous epochs. If a gang is complete, its runner is deleted first so that it saves; otherwise all pods are."""
    old = view.old_gang
    alive = [pod for pod in old if not pod.deleting]
    runner_pod = next((pod for pod in old if pod.role == CONTROL_GROUP and pod.index == 0), None)
    if runner_pod is None or any(has_ended(pod) for pod in old):
        return [removal(pod, grace=None if has_ended(pod) else GANG_GRACE) for pod in alive]
    return [] if runner_pod.deleting else [removal(runner_pod)]


def _used_up(view: JobView, record: Record) -> list[Deletion]:
    """Return deletions of the pods of elastic groups that ended, or that a restart of their group replaces."""
    deletions = []
    for group in view.elastic:
        restart_time = record.role(group).restart_time
        for pod in view.pods_of(group):
            if not pod.deleting and (has_ended(pod) or (restart_time is not None and pod.created <= restart_time)):
                deletions.append(removal(pod))
    return deletions


def _missing(view: JobView, record: Record) -> tuple[list[tuple[str, int]], list[float]]:
    """Return the missing pods whose back-off is over, and the seconds until the back-off of the others is over."""
    create, pauses = [], []
    for group in view.groups:
        for index, name in zip(view.wanted_indices(group), view.wanted_pod_names(group), strict=True):
            if name in view.pods:
                continue
            failures = record.pod_failures.get(GANG if view.is_gang(group) else name) or PodFailures()
            if view.now < failures.retry_at:
                pauses.append(failures.retry_at - view.now)
            else:
                create.append((group, index))
    return create, pauses


def _drain(view: JobView, record: Record) -> PodMoves:
    """Drain surplus pods, highest index first, and delete those that are drained, never started or exceed drainSeconds.

    A pod counts as drained only when the runner reports the state `drained` or `lost` after the drain began. An unreachable runner, or
    one that does not list the pod, is no evidence. A draining pod is deleted even if it is desired again, because its processes accept
    no more work. Its entry stays until the pod is deleted.
    """
    leaving = [pod for pod in view.pods_of(*view.elastic) if _leaves(view, record, pod)]
    leaving.sort(key=lambda pod: (pod.role, pod.index), reverse=True)
    report, runner_pod = fresh_report(view), view.first_actor
    timeout = view.spec.runtime.drain_seconds + DRAIN_MARGIN
    draining = {pod.name: record.draining.get(pod.name, view.now) for pod in leaving}
    delete, waiting, requeue_times = [], [], []
    for pod in leaving:
        if not is_active(pod):
            continue
        remaining = draining[pod.name] + timeout - view.now
        current = report is not None and report.at >= draining[pod.name]
        state = report.state_of(pod.name) if report is not None and current else None
        if state in ("drained", "lost") or pod.phase == "Pending" or remaining <= 0:
            delete.append(removal(pod))
            continue
        requeue_times.append(remaining)
        if state != "draining":
            waiting.append(pod.name)
    calls: tuple[ControlCall, ...] = ()
    if waiting and runner_pod is not None:
        calls = (ControlCall(method="POST /drain", body={"pods": waiting}, ip=runner_pod.ip, epoch=runner_pod.epoch),)
    return PodMoves(delete=tuple(delete), calls=calls, draining=draining, again=tuple(requeue_times))


def _leaves(view: JobView, record: Record, pod: PodView) -> bool:
    return pod.index not in view.wanted_indices(pod.role) or pod.name in record.draining


def fresh_report(view: JobView) -> Report | None:
    """Return the status of the runner if the newest poll succeeded; None otherwise."""
    progress, runner_pod = view.observed.progress, view.first_actor
    if progress is None or progress.error or runner_pod is None or not runner_pod.ip or not is_active(runner_pod):
        return None
    return view.report
