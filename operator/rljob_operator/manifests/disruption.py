"""What keeps the cluster from ending actor pods for reasons of its own: no step runs without one of them.

A PodDisruptionBudget refuses evictions (`kubectl drain`, the descheduler), annotations keep autoscalers from taking the node away. To
drain a node with an actor pod, suspend the job, or set `scheduling.evictions: allow`.
"""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "policy/v1"
KIND = "PodDisruptionBudget"
DO_NOT_DISRUPT = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def budget(job: RLJob, *, config: OperatorConfig) -> dict[str, Any]:
    """Return the budget of the actor's pods; one that allows every eviction where the job does, so that an edit changes it in place.

    minAvailable and not maxUnavailable: for the latter Kubernetes would take the size of the gang from the job's scale, which is that of
    the rollouts. A pod that is not ready may go: it holds up the gang anyway.
    """
    name, _, uid = meta.identity(job)
    spec = {
        "minAvailable": job.spec.actor.replicas if avoided(job) else 0,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {**naming.job_labels(name, uid), naming.LABEL_ROLE: naming.ACTOR}},
    }
    return meta.support(
        job, KIND, naming.budget(name), {"spec": spec}, api_version=API_VERSION, component=naming.ACTOR, config=config
    )


def keep_away(job: RLJob, role: str) -> dict[str, str]:
    """Return the annotations of a role's pods that keep autoscalers away."""
    return DO_NOT_DISRUPT if role == naming.ACTOR and avoided(job) else {}


def avoided(job: RLJob) -> bool:
    """Return whether actor pods are not to be evicted."""
    return job.spec.scheduling.evictions == "avoid"
