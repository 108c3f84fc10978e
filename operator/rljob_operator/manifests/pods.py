"""Pods of the launch plan. `rl_core.api.pods` has the fields of a pod that a job may set; this module sets all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.roles import FabricRoleSpec, RoleSpec
from rl_core.plan.groups import Group, groups_of
from rl_core.plan.launch import PodPlan
from rljob_operator import naming
from rljob_operator.manifests import claims, containers, disruption, gang, meta, volumes
from rljob_operator.manifests.template import template_hash
from rljob_operator.model import OperatorConfig

DEAD_NODE_SECONDS = 30
"""Seconds that pods stay on a node that is not ready or unreachable."""
DEAD_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def build(
    job: RLJob, pod_plan: PodPlan, *, config: OperatorConfig, groups: Mapping[str, Group] | None = None
) -> dict[str, Any]:
    """Return the pod of `pod_plan`. Raises ImageMissing when neither the job nor the operator names an image."""
    groups = groups_of(job.spec) if groups is None else groups
    group = groups[pod_plan.role]
    by_container = [(container, groups[container.image_role]) for container in pod_plan.containers]
    body: dict[str, Any] = {
        **_fixed(job, pod_plan),
        **_chosen(job, pod_plan, group.spec),
        "initContainers": [
            containers.init(job, owner, init, config=config)
            for _, owner in by_container
            for init in owner.spec.init_containers
        ],
        "containers": [
            containers.main(job, pod_plan, container, config=config, group=owner) for container, owner in by_container
        ],
        "volumes": volumes.build(job, pod_plan, groups),
        "resourceClaims": claims.of_pod(job, pod_plan, groups),
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, pod_plan, group, config=config),
        "spec": {key: value for key, value in body.items() if value not in ([], {}, None)},
    }
    return _merged(pod, gang.manifests(job, config=config, groups=groups).pod_fields.get(pod_plan.role, {}))


def _metadata(job: RLJob, plan: PodPlan, group: Group, *, config: OperatorConfig) -> dict[str, Any]:
    metadata = meta.metadata(job, plan.name, component=plan.role, version=config.version)
    epoch = plan.containers[0].processes[0].env["RLJOB_EPOCH"]
    queued, kueue_annotations = gang.kueue_group(job, group, epoch)
    metadata["labels"] = {
        **group.spec.labels,
        **queued,
        **metadata["labels"],
        naming.LABEL_ROLE: plan.role,
        naming.LABEL_INDEX: str(plan.index),
        naming.LABEL_EPOCH: epoch,
    }
    metadata["annotations"] = {
        **disruption.no_scale_down_annotations(job, group),
        **group.spec.annotations,
        **kueue_annotations,
        naming.ANNOTATION_TEMPLATE_HASH: template_hash(job, group, config=config),
    }
    return metadata


def _fixed(job: RLJob, plan: PodPlan) -> dict[str, Any]:
    """Return the fields that are the same for all jobs. Containers are never restarted in place, because the operator replaces pods."""
    return {
        "restartPolicy": "Never",
        "hostname": plan.name,
        "subdomain": naming.service(job.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": False,
    }


def _chosen(job: RLJob, plan: PodPlan, spec: RoleSpec) -> dict[str, Any]:
    security = spec.security_context
    return {
        "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": containers.USER if security.run_as_user is None else security.run_as_user,
            "runAsGroup": containers.USER if security.run_as_group is None else security.run_as_group,
            "fsGroup": containers.USER if security.fs_group is None else security.fs_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": security.seccomp_profile.type},
            **({"supplementalGroups": security.supplemental_groups} if security.supplemental_groups else {}),
        },
        "imagePullSecrets": [meta.api(secret) for secret in spec.image_pull_secrets],
        "nodeSelector": spec.node_selector,
        "tolerations": _tolerations(spec),
        "affinity": meta.api(spec.affinity) if spec.affinity is not None else None,
        "topologySpreadConstraints": _spread(job, plan, spec),
        "serviceAccountName": spec.service_account_name,
        "priorityClassName": spec.priority_class_name,
        "runtimeClassName": spec.runtime_class_name,
        "schedulerName": spec.scheduler_name,
        "dnsConfig": meta.api(spec.dns_config),
        **(_HOST_NETWORK if isinstance(spec, FabricRoleSpec) and spec.host_network else {}),
    }


_HOST_NETWORK = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
"""The DNS policy is needed because a pod on the node's network would otherwise use the node's name server, which does not know the job's
pods.
"""


def _tolerations(spec: RoleSpec) -> list[dict[str, Any]]:
    """Return the user's tolerations, and default ones for dead nodes unless the user has set these."""
    keys = {toleration.key for toleration in spec.tolerations}
    defaults = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": DEAD_NODE_SECONDS}
        for key in DEAD_NODE_TAINTS
        if key not in keys
    ]
    return [meta.api(toleration) for toleration in spec.tolerations] + defaults


def _spread(job: RLJob, plan: PodPlan, spec: RoleSpec) -> list[dict[str, Any]]:
    """Return the topology spread constraints. One without a selector gets that of the role's pods."""
    name, _, uid = meta.identity(job)
    selector = {"matchLabels": {**naming.job_labels(name, uid), naming.LABEL_ROLE: plan.role}}
    return [{"labelSelector": selector, **meta.api(constraint)} for constraint in spec.topology_spread_constraints]


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` merged in recursively."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged
