"""Which pods to delete and to make while a job runs: the gang of the present epoch, rollouts and envs as many as wanted.

Names are deterministic, so a pod is made when its name is free: a replacement waits until the pod before it is gone, and for its
back-off. Surplus pods finish their work before they go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_core.plan.failure_rules import Ends
from rl_core.plan.groups import CONTROL_GROUP
from rljob_operator.model import ControlCall, Deletion, PodView
from rljob_operator.reconcile.job_view import JobView, has_ended, is_active
from rljob_operator.reconcile.record import GANG, Record
from rljob_operator.reconcile.report import Report

GANG_GRACE = 10
"""Seconds that pods of a broken gang get to end: without all ranks there is nothing to save."""
STUCK_SECONDS = 15.0
"""Seconds after its deletion deadline until a pod on a dead node is deleted by force."""
DRAIN_MARGIN = 10.0
"""Seconds beyond runtime.drainSeconds until a draining pod is deleted anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodMoves:
    """What to do with pods now."""

    delete: tuple[Deletion, ...] = ()
    create: tuple[tuple[str, int], ...] = ()
    """(group, index) of the pods to create."""
    calls: tuple[ControlCall, ...] = ()
    draining: Mapping[str, float]
    """Pods asked to finish, and since when."""
    again: tuple[float, ...] = ()
    """Seconds after which something is due."""


def run(view: JobView, record: Record, *, may_create: bool) -> PodMoves:
    """Return the moves towards the wanted pods."""
    moves = _drain(view, record)
    delete = {deletion.name: deletion for deletion in (*_teardown(view), *_used_up(view, record), *moves.delete)}
    again = list(moves.again)
    for pod in view.pods.values():
        forced, wait = stuck(pod, view.now)
        if forced is not None:
            delete[pod.name] = forced
        again += [] if wait is None else [wait]
    create, waits = _missing(view, record) if may_create else ([], [])
    return replace(
        moves, delete=tuple(delete[name] for name in sorted(delete)), create=tuple(create), again=(*again, *waits)
    )


def stuck(pod: PodView, now: float) -> tuple[Deletion | None, float | None]:
    """Return (the forced deletion of a pod that its dead node will never end, seconds until it may be due)."""
    unseen = not pod.acknowledged and bool(pod.node)
    if not pod.deleting or pod.deletion_deadline is None or not (pod.node_lost or unseen):
        return None, None
    left = pod.deletion_deadline + STUCK_SECONDS - now
    if left > 0:
        return None, left
    return Deletion(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=0), None


def removal(pod: PodView, *, grace: int | None = None) -> Deletion:
    """Return the deletion of a pod."""
    return Deletion(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=grace)


def _teardown(view: JobView) -> list[Deletion]:
    """End the gangs of older epochs: a whole one by its runner first, which saves; a broken one at once."""
    old = view.old_gang
    alive = [pod for pod in old if not pod.deleting]
    first = next((pod for pod in old if pod.role == CONTROL_GROUP and pod.index == 0), None)
    if first is None or any(has_ended(pod) for pod in old):
        return [removal(pod, grace=None if has_ended(pod) else GANG_GRACE) for pod in alive]
    return [] if first.deleting else [removal(first)]


def _used_up(view: JobView, record: Record) -> list[Deletion]:
    """Return deletions of the pods of elastic groups that ended, or that a restart of their group replaces."""
    found = []
    for group in view.elastic:
        mark = record.role(group).restart_time
        for pod in view.pods_of(group):
            if not pod.deleting and (has_ended(pod) or (mark is not None and pod.created <= mark)):
                found.append(removal(pod))
    return found


def _missing(view: JobView, record: Record) -> tuple[list[tuple[str, int]], list[float]]:
    """Return the wanted pods whose names are free and whose back-off is over, and the waits of the others."""
    create, waits = [], []
    for group in view.groups:
        for index, name in zip(view.indices(group), view.wanted(group), strict=True):
            if name in view.pods:
                continue
            ends = record.pod_failures.get(GANG if view.is_gang(group) else name) or Ends()
            if view.now < ends.retry_at:
                waits.append(ends.retry_at - view.now)
            else:
                create.append((group, index))
    return create, waits


def _drain(view: JobView, record: Record) -> PodMoves:
    """Ask surplus pods to finish, highest index first; delete those that have, those that never started, and those whose time is up.

    That the runner does not answer, or does not list a pod, says nothing about the pod's work: only its `drained` or `lost`, given
    after the pod was asked, does. A pod once asked goes even if it is wanted again: its processes take no more work. Its entry stays
    until its name is free.
    """
    leaving = [pod for pod in view.pods_of(*view.elastic) if _leaves(view, record, pod)]
    leaving.sort(key=lambda pod: (pod.role, pod.index), reverse=True)
    report, first = answering(view), view.first_actor
    patience = view.spec.runtime.drain_seconds + DRAIN_MARGIN
    draining = {pod.name: record.draining.get(pod.name, view.now) for pod in leaving}
    delete, waiting, again = [], [], []
    for pod in leaving:
        if not is_active(pod):
            continue
        left = draining[pod.name] + patience - view.now
        fresh = report is not None and report.at >= draining[pod.name]
        state = report.state_of(pod.name) if report is not None and fresh else None
        if state in ("drained", "lost") or pod.phase == "Pending" or left <= 0:
            delete.append(removal(pod))
            continue
        again.append(left)
        if state != "draining":
            waiting.append(pod.name)
    calls: tuple[ControlCall, ...] = ()
    if waiting and first is not None:
        calls = (ControlCall(method="POST /drain", body={"pods": waiting}, ip=first.ip, epoch=first.epoch),)
    return PodMoves(delete=tuple(delete), calls=calls, draining=draining, again=tuple(again))


def _leaves(view: JobView, record: Record, pod: PodView) -> bool:
    return pod.index not in view.indices(pod.role) or pod.name in record.draining


def answering(view: JobView) -> Report | None:
    """Return the runner's word if it still answers."""
    progress, first = view.observed.progress, view.first_actor
    if progress is None or progress.error or first is None or not first.ip or not is_active(first):
        return None
    return view.report
