"""Converts API objects to the typed views that decisions use. Never raises: invalid fields are treated as absent.

Called by the cache, once per object version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from rljob_operator import naming
from rljob_operator.model import ContainerEnd, Object, Observed, PodView, Progress
from rljob_operator.times import to_seconds

KUBELET_REASONS = frozenset(
    {"ContainersNotReady", "PodCompleted", "PodFailed", "ReadinessGatesNotReady", "UnknownContainerStatuses"}
)
"""Reasons of Ready=False that a kubelet gives; the node controller keeps the one that was there, which is none of these."""
STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of waiting containers that mean no trouble."""
CLOCK_SLACK = 5.0
"""Seconds by which a node's clock may be behind the API server's."""


def pod_view(pod: Object) -> PodView:
    """Return the view of a pod."""
    meta, status = _map(pod.get("metadata")), _map(pod.get("status"))
    spec = _map(pod.get("spec"))
    sidecars = frozenset(str(c.get("name")) for c in _maps(spec.get("initContainers")) if c.get("restartPolicy"))
    labels = _map(meta.get("labels"))
    conditions = {str(c.get("type")): c for c in _maps(status.get("conditions"))}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    disrupted = conditions.get("DisruptionTarget", {})
    ended = tuple(_ends(status, sidecars))
    return PodView(
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        job_uid=_owner(meta),
        role=str(labels.get(naming.LABEL_ROLE, "")),
        index=_int(labels.get(naming.LABEL_INDEX)),
        epoch=_int(labels.get(naming.LABEL_EPOCH)),
        created=to_seconds(meta.get("creationTimestamp")) or 0.0,
        deleting=meta.get("deletionTimestamp") is not None,
        deletion_deadline=to_seconds(meta.get("deletionTimestamp")),
        deleted_alive=_deleted_alive(meta, ended),
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        phase=str(status.get("phase") or "Pending"),
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or ""),
        scheduled=bool(spec.get("nodeName")),
        unschedulable=str(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        acknowledged=status.get("startTime") is not None,
        ready=ready.get("status") == "True",
        node_lost=_node_lost(meta, status, ready, disrupted),
        conditions=tuple(sorted(name for name, c in conditions.items() if c.get("status") == "True")),
        disrupted=str(disrupted.get("reason") or "DisruptionTarget") if disrupted.get("status") == "True" else "",
        preparing=_preparing(status, sidecars),
        waiting=_waiting(status),
        ended=ended,
    )


def observe(
    *,
    pods: Iterable[Object] = (),
    objects: Sequence[Object] = (),
    name_conflicts: Sequence[str] = (),
    refusals: Mapping[str, str] | None = None,
    claims: Mapping[str, Object] | None = None,
    progress: Progress | None = None,
    refused_change: tuple[int, str] | None = None,
) -> Observed:
    """Return the input of one reconcile, from API objects."""
    return Observed(
        pods=tuple(pod_view(pod) for pod in pods),
        objects=tuple(objects),
        name_conflicts=tuple(name_conflicts),
        refusals=refusals or {},
        claims=claims or {},
        progress=progress,
        refused_change=refused_change,
    )


def _node_lost(
    meta: Mapping[str, Any], status: Mapping[str, Any], ready: Mapping[str, Any], disrupted: Mapping[str, Any]
) -> bool:
    """Return whether the node of a pod is probably dead.

    That is so if the node controller has set the pod's condition Ready to False, or if the kubelet has not reacted to its deletion in time.
    The first sign alone is not enough: a pod that was not ready when its node died keeps the last condition of the kubelet.
    """
    if ready.get("status") in ("False", "Unknown") and str(ready.get("reason") or "") not in KUBELET_REASONS:
        return True
    if meta.get("deletionTimestamp") is None:
        return False
    tainted = disrupted.get("status") == "True" and disrupted.get("reason") == "DeletionByTaintManager"
    observed = _int(status.get("observedGeneration"))  # Kubernetes 1.34 and later
    return tainted or 0 < observed < _int(meta.get("generation"))


def _deleted_alive(meta: Mapping[str, Any], ended: Iterable[ContainerEnd]) -> bool:
    """Return whether the pod was deleted while its containers ran, so that they ended because of the deletion."""
    deadline = to_seconds(meta.get("deletionTimestamp"))
    if deadline is None:
        return False
    deleted_at = deadline - _int(meta.get("deletionGracePeriodSeconds"))
    return all(end.finished is None or end.finished >= deleted_at - CLOCK_SLACK for end in ended)


def _owner(meta: Mapping[str, Any]) -> str:
    for owner in _maps(meta.get("ownerReferences")):
        if owner.get("kind") == "RLJob":
            return str(owner.get("uid", ""))
    return ""


def _preparing(status: Mapping[str, Any], sidecars: Set[str]) -> str:
    """Return the name of the running init container, empty without one. Sidecars are left out, because they run as long as the pod."""
    running = (c for c in _maps(status.get("initContainerStatuses")) if "running" in _map(c.get("state")))
    names = (str(container.get("name", "")) for container in running)
    return next((name for name in names if name not in sidecars), "")


def _waiting(status: Mapping[str, Any]) -> str:
    for container in [*_maps(status.get("initContainerStatuses")), *_maps(status.get("containerStatuses"))]:
        waiting = _map(_map(container.get("state")).get("waiting"))
        reason = str(waiting.get("reason") or "")
        if reason and reason not in STARTING:
            message = str(waiting.get("message") or "")
            return f"{reason}: {message}" if message else reason
    return ""


def _ends(status: Mapping[str, Any], sidecars: Set[str]) -> Iterator[ContainerEnd]:
    """Yield the ended containers, without init containers that succeeded and without sidecars."""
    for init, key in ((True, "initContainerStatuses"), (False, "containerStatuses")):
        for container in _maps(status.get(key)):
            terminated = _map(container.get("state")).get("terminated")
            if not isinstance(terminated, Mapping):
                continue
            code = _int(terminated.get("exitCode"))
            if init and (code == 0 or str(container.get("name")) in sidecars):
                continue
            yield ContainerEnd(
                name=str(container.get("name", "")),
                exit_code=code,
                init=init,
                reason=str(terminated.get("reason") or ""),
                message=str(terminated.get("message") or ""),
                finished=to_seconds(terminated.get("finishedAt")),
            )


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
