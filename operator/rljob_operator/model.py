"""The data types of a reconcile: what the operator observes (`Observed`), and what it decides to do (`Plan`).

The cache produces them from API objects, the pure functions of `reconcile` compute a plan, and `apply` carries it out in the order of its
fields: the status is written before anything is deleted or created. A plan that deletes objects, raises the epoch or ends the job is
computed again from fresh reads before it is carried out.

The epoch is the number of gang restarts of a job, used for fencing; see `reconcile/lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_core.api.defaults import Defaults

Object = Mapping[str, Any]
"""A Kubernetes object as decoded JSON, with camelCase keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorConfig:
    """The administrator's settings (chart values), which are the same for all jobs."""

    namespace: str = "rljob-system"
    """Namespace of the operator, its master key and its Lease. Jobs in this namespace are not served."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Image of a role (actor, rollout, env) where the job names none."""
    image_pull_policy: str | None = None
    """Pull policy where the job names none; None means the default of the cluster."""
    metrics_namespace_labels: Mapping[str, str] = field(default_factory=lambda: {"rljob.dev/metrics": "true"})
    """Label of namespaces whose pods may scrape the job's metrics port."""
    dns_namespace_labels: Mapping[str, str] = field(
        default_factory=lambda: {"kubernetes.io/metadata.name": "kube-system"}
    )
    """Label of the namespace of the cluster's DNS."""
    dns_pod_labels: Mapping[str, str] = field(default_factory=lambda: {"k8s-app": "kube-dns"})
    """Label of the pods of the cluster's DNS."""
    dns_cidrs: tuple[str, ...] = ("169.254.20.10/32",)
    """Address blocks of DNS servers that are not pods, such as a DNS cache on each node."""
    key_id: str = ""
    """Id of the master key of new jobs (runtime.master_key)."""
    gang_api: str | None = None
    """`group/version` of the gang scheduling API (manifests.gang); None if the cluster has none, or the operator may not use it."""
    version: str = "0.1.0"
    """Operator version, a label of all objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerEnd:
    """One ended container of a pod (init or main)."""

    name: str
    exit_code: int
    init: bool = False
    """Whether it is an init container."""
    reason: str
    """Reason from the kubelet: Completed, Error, OOMKilled, ..."""
    message: str
    """Termination message: JSON of the supervisor, or the last log lines of the container."""
    finished: float | None = None
    """Time of the end by the clock of its node, seconds since 1970; None if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """One pod with the operator's labels."""

    name: str
    uid: str
    job_uid: str
    """uid of the RLJob in the owner reference; empty without one."""
    role: str
    index: int
    epoch: int
    """Epoch at creation, from the label; compared for actor pods only."""
    created: float
    """Seconds since 1970."""
    deleting: bool = False
    deletion_deadline: float | None = None
    """deletionTimestamp, which includes the grace period, seconds since 1970."""
    deleted_alive: bool = False
    """Whether it was deleted while its containers ran."""
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    reason: str = ""
    """status.reason of the pod (Evicted, NodeLost, ...)."""
    message: str = ""
    scheduled: bool = False
    unschedulable: str = ""
    """Message of the scheduler while the pod is not bound to a node; empty otherwise."""
    acknowledged: bool = False
    """Whether a kubelet has seen it (status.startTime)."""
    ready: bool = False
    node_lost: bool = False
    """Whether its node is probably dead: the node controller set Ready to False, or no kubelet has reacted to the deletion."""
    conditions: tuple[str, ...] = ()
    """Types of the conditions that are true."""
    disrupted: str = ""
    """Reason of the condition DisruptionTarget=True."""
    preparing: str = ""
    """Name of the running init container; empty without one."""
    waiting: str = ""
    """First waiting container's reason and message, e.g. `ImagePullBackOff: ...`; without PodInitializing and ContainerCreating."""
    ended: tuple[ContainerEnd, ...] = ()
    """Main containers that ended, and init containers that ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The runner's last answer to `GET /status`."""

    status: Object
    """The status that the runner serves at `/status`; the poller keeps only the fields that decisions use (runner_status.py)."""
    at: float
    """Time at which it was received, seconds since 1970."""
    pod_uid: str
    """uid of the actor-0 pod that sent it."""
    error: str = ""
    """Error of the newest poll; empty if it succeeded."""
    failing_since: float | None = None
    """Since when polls fail, seconds since 1970; None while they succeed."""
    failures: int = 0
    """Number of consecutive failed polls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The input of one reconcile besides the job."""

    pods: tuple[PodView, ...] = ()
    """Pods with the label `rljob.dev/job` of this name, whoever owns them."""
    objects: tuple[Object, ...] = ()
    """Services, ConfigMaps, NetworkPolicies, PodDisruptionBudgets, ResourceClaims (templates), gang objects with our labels of this job name."""
    name_conflicts: tuple[str, ...] = ()
    """`kind/name` of objects that have a name the job needs and lack the operator's labels; found when a create failed with 409."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Creates and applies that were refused and have not succeeded since: `kind/name` -> message of the API server (quota, admission,
    missing account, a field that cannot change). Every plan contains them again; `apply` delays the attempts.
    """
    claims: Mapping[str, Object] = field(default_factory=dict)
    """The PersistentVolumeClaims of all roles' volumes, by name; those that do not exist are left out."""
    defaults: Defaults | None = None
    """The schema defaults that the job was accepted with; None before that, or if they are lost."""
    progress: Progress | None = None
    refused_change: tuple[int, str] | None = None
    """(generation, message of the runner) of the newest changed spec that the runner refused; None when it refused none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """One object to delete. The deletion always has a uid precondition."""

    kind: Literal["Pod", "RLJob", "ResourceClaimTemplate"]
    name: str
    uid: str
    grace_seconds: int | None = None
    """Grace period in seconds. None means that of the pod; 0 forces the deletion, for pods on dead nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlCall:
    """One call to the control port of the runner at `ip`.

    A failed call does not make the reconcile fail; it is sent again by a later one.
    """

    method: Literal["PUT /control", "POST /checkpoint", "POST /drain", "POST /finish"]
    body: Any
    ip: str
    epoch: int
    """Epoch of the gang that it is for; a runner of another epoch refuses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """One Kubernetes event about the job; the recorder aggregates equal ones."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A change of the number of rollouts in the job's spec, through the scale subresource."""

    replicas: int
    generation: int
    """Generation of the spec that the decision was made on. Nothing is written if the user has changed the spec since."""
    event: JobEvent
    """Event that is recorded when the change is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The effects of one reconcile, in the order of the fields: status, deletions, supporting objects, Secret, pods, calls, scale."""

    status: Object | None = None
    """The whole new status; None means that it is unchanged."""
    progress_only: bool = False
    """Whether the status differs only in progress such as step and reward, so that the write may be delayed to the progress interval."""
    delete: tuple[Deletion, ...] = ()
    ensure: tuple[Object, ...] = ()
    """Supporting objects for server-side apply, without those whose manifest hash is unchanged."""
    ensure_secret: bool = False
    """Whether the job's Secret must exist; it is derived from the master key and created if absent."""
    create: tuple[Object, ...] = ()
    """Pods to create."""
    calls: tuple[ControlCall, ...] = ()
    events: tuple[JobEvent, ...] = ()
    scale: Scale | None = None
    requeue_after: float | None = None
    """Seconds until the next reconcile even if nothing changes. 0 means at once, None means only after a change."""
