"""What the operator sees and what it decides: the values between the cache, the pure `reconcile` and `apply`.

Children are read into small frozen views, so that rules are written over facts and not over nested API dictionaries. A Plan's
effects are carried out in the order of its fields: intent (status) is written before anything is deleted or created.
A plan that deletes, raises the epoch or ends the job is made a second time over fresh reads before it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_core.api.defaults import Defaults

Object = Mapping[str, Any]
"""A Kubernetes object as the API server speaks it: JSON, camelCase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorConfig:
    """What the administrator set (chart values); the same for all jobs."""

    namespace: str = "rljob-system"
    """Where the operator runs; its master key and Lease live here, so no job of this namespace is served."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Image of a role (actor, rollout, env) where the job names none."""
    image_pull_policy: str | None = None
    """Pull policy where the job names none; None = the cluster's default."""
    metrics_namespace_labels: Mapping[str, str] = field(default_factory=lambda: {"rljob.dev/metrics": "true"})
    """Label of namespaces whose pods may scrape the job's metrics port."""
    dns_namespace_labels: Mapping[str, str] = field(
        default_factory=lambda: {"kubernetes.io/metadata.name": "kube-system"}
    )
    """Label of the namespace of the cluster's DNS."""
    dns_pod_labels: Mapping[str, str] = field(default_factory=lambda: {"k8s-app": "kube-dns"})
    """Label of the pods of the cluster's DNS."""
    dns_cidrs: tuple[str, ...] = ("169.254.20.10/32",)
    """Addresses of DNS that is no pod: where a cluster with a DNS cache per node answers."""
    key_id: str = ""
    """Id of the master key of new jobs (runtime.master_key)."""
    gang_api: str | None = None
    """`group/version` of the API that schedules pods together (manifests.gang); None = the cluster serves none, or not to us."""
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
    """As the kubelet says: Completed, Error, OOMKilled, ..."""
    message: str
    """Termination message: the supervisor's JSON, else the container's last log lines."""
    finished: float | None = None
    """When it ended by its node's clock, seconds since 1970; None when nobody saw it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """One pod with our labels."""

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
    """The scheduler's words while the pod is not bound."""
    acknowledged: bool = False
    """Whether a kubelet has seen it (status.startTime)."""
    ready: bool = False
    node_lost: bool = False
    """Whether its node seems gone: Ready was set to false by the node controller, or no kubelet has seen that it is deleted."""
    conditions: tuple[str, ...] = ()
    """Types of the conditions that are true."""
    disrupted: str = ""
    """Reason of the condition DisruptionTarget=True."""
    preparing: str = ""
    """The init container that runs."""
    waiting: str = ""
    """First waiting container's reason and message, e.g. `ImagePullBackOff: ...`; without PodInitializing and ContainerCreating."""
    ended: tuple[ContainerEnd, ...] = ()
    """Main containers that ended, and init containers that ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The runner's last answer to `GET /status`."""

    status: Object
    """The status that the runner serves at `/status`."""
    at: float
    """When it was received, seconds since 1970."""
    pod_uid: str
    """The actor-0 pod that gave it."""
    error: str = ""
    """Why the newest poll failed; empty when it did not."""
    failing_since: float | None = None
    """Since when polls fail, seconds since 1970; None while they succeed."""
    failures: int = 0
    """Polls in a row that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """All that one reconcile looks at besides the job."""

    pods: tuple[PodView, ...] = ()
    """Pods with our label `rljob.dev/job` of this name, whoever owns them."""
    objects: tuple[Object, ...] = ()
    """Services, ConfigMaps, NetworkPolicies, PodDisruptionBudgets, ResourceClaims (templates), gang objects with our labels of this job name."""
    name_conflicts: tuple[str, ...] = ()
    """`kind/name` of objects that hold a name we need and do not carry our labels (found when a create met 409)."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Creates and applies that were refused and have not succeeded since: `kind/name` -> the API server's words (quota, admission,
    missing account, a field that cannot change). A plan names them again each time; apply paces the tries."""
    claims: Mapping[str, Object] = field(default_factory=dict)
    """The PersistentVolumeClaims of all roles' volumes, by name; absent = not found."""
    defaults: Defaults | None = None
    """Those the job was accepted under; None = it was not yet, or they are lost."""
    progress: Progress | None = None
    refused_change: tuple[int, str] | None = None
    """(generation, the runner's words) of the newest changed spec that the runner refused; None when it refused none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """One object to delete; always with a uid precondition."""

    kind: Literal["Pod", "RLJob", "ResourceClaimTemplate"]
    name: str
    uid: str
    grace_seconds: int | None = None
    """None = the pod's own; 0 = force, for pods on dead nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlCall:
    """One call of the runner's control port; sent to `ip` at most once per reconcile, its failure is no failure of the reconcile."""

    method: Literal["PUT /control", "POST /checkpoint", "POST /drain", "POST /finish"]
    body: Any
    ip: str
    epoch: int
    """Of the gang it is meant for: a runner of another refuses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """One Kubernetes event about the job; the recorder aggregates equal ones."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Another number of rollouts for the job's spec, by the scale subresource."""

    replicas: int
    generation: int
    """Of the spec that it was decided on: a newer one is the user's word, and wins."""
    event: JobEvent
    """Told once it is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do now, in this order."""

    status: Object | None = None
    """The whole new status; None = as it is."""
    progress_only: bool = False
    """Whether the status differs in step, reward and the like only, so that its write may wait for the progress interval."""
    delete: tuple[Deletion, ...] = ()
    ensure: tuple[Object, ...] = ()
    """Objects for server-side apply, already without those whose manifest hash is right."""
    ensure_secret: bool = False
    """Whether the job's Secret must be asserted (derived from the master key, created when absent)."""
    create: tuple[Object, ...] = ()
    """Pods."""
    calls: tuple[ControlCall, ...] = ()
    events: tuple[JobEvent, ...] = ()
    scale: Scale | None = None
    requeue_after: float | None = None
    """Seconds until the job must be looked at again though nothing changes; 0 = at once, None = when something does."""
