"""Names, labels and annotations of everything that belongs to a job. Pure.

Names are functions of the job's name, which has at most 40 characters, so that they fit into 63. The name of the Secret also contains the
uid: the Secret is only created, never read, so AlreadyExists must mean that it belongs to this job and not to an earlier one of the same
name. The gang objects of the built-in API also contain the uid (manifests/gang.py).
"""

from __future__ import annotations

from rl_core.plan.groups import CONTROL_GROUP

LABEL_JOB = "rljob.dev/job"
LABEL_JOB_UID = "rljob.dev/job-uid"
LABEL_ROLE = "rljob.dev/role"
LABEL_INDEX = "rljob.dev/index"
LABEL_EPOCH = "rljob.dev/epoch"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_VERSION = "app.kubernetes.io/version"
LABEL_NAMESPACE = "kubernetes.io/metadata.name"
"""Put on every namespace by the API server."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""Copied from the job to its pods."""
ANNOTATION_TEMPLATE_HASH = "rljob.dev/template-hash"
ANNOTATION_MANIFEST_HASH = "rljob.dev/manifest-hash"
FIELD_MANAGER = "rljob-operator"
APP = "rljob"
OPERATOR_APP = "rljob-operator"
"""LABEL_NAME of the operator's own pods."""


def pod(job: str, group: str, index: int) -> str:
    """Return the name of a pod of a group."""
    return f"{job}-{group}-{index}"


def runner_pod(job: str) -> str:
    """Return the name of the pod in which the runner and the channel server run."""
    return pod(job, CONTROL_GROUP, 0)


def service(job: str) -> str:
    """Return the name of the headless Service, the domain of the pods' names."""
    return job


def config_map(job: str) -> str:
    """Return the name of the ConfigMap with the resolved job."""
    return f"{job}-config"


def secret(job: str, uid: str) -> str:
    """Return the name of the Secret with the job's keys."""
    return f"{job}-keys-{uid[:8]}"


def network_policy(job: str, target: str) -> str:
    """Return the name of the NetworkPolicy of a group, or of the pod of the runner (`actor-0`)."""
    return f"{job}-{target}"


def budget(job: str, group: str) -> str:
    """Return the name of the PodDisruptionBudget of a gang."""
    return f"{job}-{group}"


def claim_template(job: str, group: str, digest: str) -> str:
    """Return the name of the ResourceClaimTemplate of the accelerators of a group.

    `digest` identifies the content of the template, which cannot change.
    """
    return f"{job}-{group}-gpus-{digest}"


def output_folder(job: str, uid: str) -> str:
    """Return the folder of a job below `checkpoint.path`: a re-created job never mixes with an earlier one of its name."""
    return f"{job}-{uid[:8]}"


def job_labels(job: str, uid: str) -> dict[str, str]:
    """Return the labels that select everything of one job."""
    return {LABEL_JOB: job, LABEL_JOB_UID: uid}


def group_selector(job: str, group: str) -> str:
    """Return the label selector of the pods of a group, as text (`status.rollout.selector`)."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={group}"
