"""The deletion of pods when a job is suspended or has ended (deletionPolicy, ttlSecondsAfterFinished)."""

from __future__ import annotations

from rljob_operator.model import ControlCall, Deletion, PodView
from rljob_operator.reconcile import deadlines
from rljob_operator.reconcile.job_view import JobView, has_ended, is_active
from rljob_operator.reconcile.lifecycle import seconds_to_save
from rljob_operator.reconcile.record import Record
from rljob_operator.reconcile.scaling import PodMoves, forced_deletion, removal

STOP_SECONDS = 120.0
"""Seconds after the end of the job until actor pods that still run are deleted."""
ASK_AGAIN = 5.0
"""Seconds between requests to the runner to finish."""


def suspend(view: JobView, record: Record) -> PodMoves:
    """Return the calls and deletions of a suspension: the runner saves a checkpoint, then all pods are deleted."""
    remaining = seconds_to_save(view, record)
    if remaining <= 0:
        return _delete(view, list(view.pods.values()))
    saves = record.suspension is None or record.suspension.saves
    return PodMoves(
        calls=finish(view, "suspend" if saves else "rollback"), draining={}, again=(min(remaining, ASK_AGAIN),)
    )


def ended(view: JobView) -> PodMoves:
    """Return the deletions for an ended job.

    These are running pods, pods that deletionPolicy does not keep, and the job itself after its TTL.
    """
    spec, meta = view.spec, view.job.metadata
    ttl = deadlines.until_deleted(view.record, spec.ttl_seconds_after_finished, view.now)
    if ttl == 0.0:
        return PodMoves(delete=(whole_job(view.name, meta.uid or ""),), draining={})
    failed = view.record.phase == "Failed"
    policy = spec.deletion_policy.on_failure if failed else spec.deletion_policy.on_success
    elapsed = view.now - (view.record.completion_time or view.now)
    overstayed = elapsed >= STOP_SECONDS
    deletable: list[PodView] = []
    staying: list[PodView] = []
    for pod in view.pods.values():
        if policy == "DeletePods" or (policy == "KeepActor" and not view.is_gang(pod.role) and not has_ended(pod)):
            deletable.append(pod)
        elif view.is_gang(pod.role) and is_active(pod):
            (deletable if overstayed else staying).append(pod)
    deletions = _delete(view, deletable)
    requeue_times = [
        *deletions.again,
        *([STOP_SECONDS - elapsed] if staying else []),
        *([ttl] if ttl is not None else []),
    ]
    calls = finish(view, "failed") if staying and failed else ()
    return PodMoves(delete=deletions.delete, calls=calls, draining={}, again=tuple(requeue_times))


def whole_job(name: str, uid: str) -> Deletion:
    """Return the deletion of a job; the garbage collector deletes everything that the job owns."""
    return Deletion(kind="RLJob", name=name, uid=uid)


def _delete(view: JobView, pods: list[PodView]) -> PodMoves:
    delete, requeue_times = [], []
    for pod in sorted(pods, key=lambda pod: pod.name):
        forced, wait = forced_deletion(pod, view.now)
        if not pod.deleting:
            delete.append(removal(pod))
        elif forced is not None:
            delete.append(forced)
        requeue_times += [] if wait is None else [wait]
    return PodMoves(delete=tuple(delete), draining={}, again=tuple(requeue_times))


def finish(view: JobView, reason: str) -> tuple[ControlCall, ...]:
    """Return the call that asks the runner to end: suspend and failed save a checkpoint first, rollback does not."""
    runner_pod = view.first_actor
    if runner_pod is None or not runner_pod.ip or not is_active(runner_pod):
        return ()
    return (ControlCall(method="POST /finish", body={"reason": reason}, ip=runner_pod.ip, epoch=runner_pod.epoch),)
