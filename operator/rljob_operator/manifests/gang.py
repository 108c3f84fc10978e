"""Gang scheduling: pods that are scheduled together or not at all. Each supported scheduler needs objects and fields of the pods.

    scheduling.k8s.io/v1alpha2     Kubernetes 1.36 (alpha): PodGroup, named by `spec.schedulingGroup.podGroupName`; its spec cannot change
    scheduling.volcano.sh/v1beta1  Volcano: PodGroup, named by an annotation
    scheduling.x-k8s.io/v1alpha1   coscheduling of scheduler-plugins: PodGroup, named by a label

The first that the cluster serves is used (relist.Relister). All pods of a gang are scheduled together, since no step runs without
one of them. Pods of elastic groups come and go one by one; the PodGroup of such a group has its minimum of replicas as its size, and exists
only where the API allows that size to change.

Tests run the built-in API with the scheduler it belongs to. The schedulers of the other two do not run there: their objects meet
a definition with the fields of theirs that we write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.roles import RoleSpec
from rl_core.plan.groups import Group, groups_of
from rl_core.plan.slots import own_pods
from rljob_operator import kinds, naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

BUILT_IN = "scheduling.k8s.io/v1alpha2"
VOLCANO = "scheduling.volcano.sh/v1beta1"
COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
PREFERENCE = (BUILT_IN, VOLCANO, COSCHEDULING)
KIND = "PodGroup"
KINDS = tuple(kinds.of(api, KIND) for api in PREFERENCE)
"""The kinds of gang objects, by preference."""
SMALLEST = 2
"""Pods that make a gang."""
KUEUE_GROUP, KUEUE_COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
QUANTITY = re.compile(r"([0-9]*\.?[0-9]*)(.*)")
"""A number and its unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """What a scheduler needs to know about a job's gangs."""

    objects: tuple[dict[str, Any], ...] = ()
    """For server-side apply."""
    pod_fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields to be merged into each pod, by group."""


def manifests(job: RLJob, *, config: OperatorConfig, groups: Mapping[str, Group] | None = None) -> Gang:
    """Return the gang objects of a job and the fields of its pods; empty if the cluster has no API for it or the job does not use it."""
    api = config.gang_api
    if api is None or job.spec.scheduling.gang == "none":
        return Gang()
    groups = groups_of(job.spec) if groups is None else groups
    sizes = {name: _size(job, group, groups, api) for name, group in groups.items()}
    specs = {name: _spec(job, groups[name], size, api) for name, size in sizes.items() if size >= SMALLEST}
    names = {group: _name(job, group, spec, api) for group, spec in specs.items()}
    return Gang(
        objects=tuple(
            meta.support(job, KIND, names[group], {"spec": spec}, api_version=api, component=group, config=config)
            for group, spec in specs.items()
        ),
        pod_fields={group: _fields(name, api, groups[group].spec) for group, name in names.items()},
    )


def _size(job: RLJob, group: Group, groups: Mapping[str, Group], api: str) -> int:
    """Return how many pods of a group are to be scheduled together; 0 means that each pod is scheduled alone."""
    if not group.elastic:
        return group.replicas
    return 0 if api == BUILT_IN else group.min_replicas - own_pods(job.spec, group.name, groups).start


def _spec(job: RLJob, group: Group, size: int, api: str) -> dict[str, Any]:
    """Return the group's spec, with the pods' priority where groups have one: it decides who makes room for whom.

    The built-in API silently drops it unless the feature gate WorkloadAwarePreemption is on; coscheduling uses the priority of the pods.
    """
    priority = group.spec.priority_class_name
    queue = job.spec.scheduling.queue
    volcano = {"minResources": _resources(group.spec, size)} | ({"queue": queue} if queue is not None else {})
    return {
        **({"schedulingPolicy": {"gang": {"minCount": size}}} if api == BUILT_IN else {"minMember": size}),
        **({field: value for field, value in volcano.items() if value} if api == VOLCANO else {}),
        **({"priorityClassName": priority} if priority is not None and api != COSCHEDULING else {}),
    }


def _resources(spec: RoleSpec, size: int) -> dict[str, str]:
    """Return the resources that `size` pods request. Volcano admits the group when its queue has room for them."""
    resources = {**spec.resources.limits, **spec.resources.requests}
    if spec.gpus and spec.gpu_allocation == "devicePlugin":
        resources[spec.gpu_resource] = spec.gpus
    return {name: _times(str(quantity), size) for name, quantity in sorted(resources.items())}


def _times(quantity: str, factor: int) -> str:
    """Return a quantity (`500m`, `2Gi`, `1e3`) times a whole number."""
    number, unit = QUANTITY.fullmatch(quantity).groups()  # type: ignore[union-attr] # the schema holds the form
    return f"{Decimal(number) * factor}{unit}"


def kueue_group(job: RLJob, group: Group, epoch: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (labels, annotations) by which Kueue admits a pod of a job with a queue, the pods of a gang all at once.

    Kueue admits the pods by its pod integration, because it does not know RLJobs. A pod group is one workload for it, which ends when all
    of its pods have ended, so the gang of each epoch is another pod group. Each rollout and env is a workload of its own.
    """
    queue = job.metadata.labels.get(naming.LABEL_QUEUE)
    if not queue:
        return {}, {}
    labels = {naming.LABEL_QUEUE: queue}
    if group.elastic or group.replicas < SMALLEST:
        return labels, {}
    name = f"{job.metadata.name}-{group.name}-{meta.digest([meta.identity(job)[2], epoch])[:8]}"
    return {**labels, KUEUE_GROUP: name}, {KUEUE_COUNT: str(group.replicas)}


def unavailable(job: RLJob, api: str | None) -> str:
    """Return a message about why the cluster cannot schedule the job as it demands; empty if it can."""
    scheduling = job.spec.scheduling
    if scheduling.queue is not None and api != VOLCANO:
        return f"scheduling.queue {scheduling.queue} needs the API {VOLCANO}, got {api or 'none'}; install Volcano, or remove scheduling.queue"
    if scheduling.gang == "required" and api is None:
        apis = ", ".join(PREFERENCE)
        return (
            f"scheduling.gang required needs one of the APIs {apis}, got none; "
            "serve one of them and restart the operator, or set scheduling.gang to auto"
        )
    return ""


def _name(job: RLJob, role: str, spec: Mapping[str, Any], api: str) -> str:
    """Return the name of a gang. For the built-in API it contains a digest of the spec and of the job's uid.

    In that API the spec cannot change, and the API server keeps a deleted group while pods name it: pods of a job that is
    created again would keep the group of the earlier job for ever.
    """
    name = f"{job.metadata.name}-{role}-gang"
    return f"{name}-{meta.digest([meta.identity(job)[2], spec])[:8]}" if api == BUILT_IN else name


def _fields(name: str, api: str, spec: RoleSpec) -> dict[str, Any]:
    if api == BUILT_IN:
        return {"spec": {"schedulingGroup": {"podGroupName": name}}}
    if api == COSCHEDULING:
        return {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": name}}}
    return {
        "metadata": {"annotations": {"scheduling.k8s.io/group-name": name}},
        "spec": {"schedulerName": spec.scheduler_name or "volcano"},
    }
