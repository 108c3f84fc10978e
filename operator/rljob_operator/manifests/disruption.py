"""Protection of the pods of a gang against evictions: no step runs without one of them.

A PodDisruptionBudget refuses evictions (`kubectl drain`, the descheduler), annotations keep autoscalers from taking the node away. To
drain a node with a pod of a gang, suspend the job, or set `scheduling.evictions: allow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan.groups import Group, groups_of
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "policy/v1"
KIND = "PodDisruptionBudget"
DO_NOT_DISRUPT = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def budgets(job: RLJob, *, config: OperatorConfig, groups: Mapping[str, Group] | None = None) -> list[dict[str, Any]]:
    """Return a budget for each gang. Where the job allows evictions, the budget allows all of them, so that an edit changes it in place.

    minAvailable and not maxUnavailable: for the latter Kubernetes would take the size of the gang from the job's scale, which is that of
    the rollouts. A pod that is not ready may go: it holds up the gang anyway.
    """
    groups = groups_of(job.spec) if groups is None else groups
    return [_budget(job, group, config=config) for group in groups.values() if not group.elastic]


def _budget(job: RLJob, group: Group, *, config: OperatorConfig) -> dict[str, Any]:
    name, _, uid = meta.identity(job)
    spec = {
        "minAvailable": group.replicas if evictions_blocked(job) else 0,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {**naming.job_labels(name, uid), naming.LABEL_ROLE: group.name}},
    }
    return meta.support(
        job,
        KIND,
        naming.budget(name, group.name),
        {"spec": spec},
        api_version=API_VERSION,
        component=group.name,
        config=config,
    )


def no_scale_down_annotations(job: RLJob, group: Group) -> dict[str, str]:
    """Return the annotations of the pods of a group that keep cluster autoscalers from removing their nodes."""
    return DO_NOT_DISRUPT if not group.elastic and evictions_blocked(job) else {}


def evictions_blocked(job: RLJob) -> bool:
    """Return whether evictions of the pods of gangs are blocked (scheduling.evictions)."""
    return job.spec.scheduling.evictions == "avoid"
