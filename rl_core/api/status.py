"""`status` of an RLJob: what the operator writes and people, scripts and `kubectl wait` read.

Written by the operator alone, so unknown fields are ignored on reading: a status written by a newer operator stays readable.
Times are RFC 3339 text in UTC.
"""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec

Phase = Literal["Pending", "Starting", "Running", "Suspending", "Suspended", "Restarting", "Succeeded", "Failed"]
"""Pending -> Starting -> Running -> Succeeded or Failed; Running -> Restarting -> Starting; Running -> Suspending -> Suspended -> Pending."""
ConditionType = Literal[
    "Accepted",
    "Scheduled",
    "Ready",
    "Progressing",
    "WeightsInSync",
    "Degraded",
    "Suspended",
    "Complete",
    "Failed",
]
Count = Annotated[int, Field(ge=0, lt=2**31)]
BigCount = Annotated[int, Field(ge=0, lt=2**53)]
Time = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=256)]
GroupLabel = Annotated[str, Field(max_length=63)]
"""Name of a group; any, so that a status of another version can be read."""


class StatusPart(Spec):
    """Base of the parts of a status. Unknown fields are ignored."""

    model_config = Spec.model_config | {"extra": "ignore"}


class Condition(StatusPart):
    """A condition of the job, as in other Kubernetes resources; all types are present from the first reconcile."""

    type: ConditionType
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Reason, one CamelCase word; docs/runbook.md explains each."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Message for people; it quotes the cluster where that refused something."""
    last_transition_time: Time
    """When `status` changed last."""
    observed_generation: BigCount | None = None
    """metadata.generation this was computed from."""


class RoleStatus(StatusPart):
    """Pods of one role."""

    name: GroupLabel
    """The role."""
    desired: Count = 0
    """Pods that the job asks for."""
    ready: Count = 0
    """Pods that serve."""
    active: Count = 0
    """Pods that exist and have not ended."""
    failed: Count = 0
    """Pods that ended with an error so far."""
    min_version: BigCount | None = None
    """Oldest policy version among ready rollouts."""
    max_version: BigCount | None = None
    """Newest policy version among ready rollouts."""
    restarts: Count = 0
    """Pods of the role that were replaced after they ended."""
    restart_time: Time | None = None
    """Time of the last RestartRole; pods of the role that are older are replaced."""


class RolloutScale(StatusPart):
    """What `kubectl scale` and an autoscaler read."""

    replicas: Count = 0
    """Rollout pods that exist and have not ended."""
    ready_replicas: Count = 0
    """Rollout pods that serve."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the rollout pods."""


class CheckpointStatus(StatusPart):
    """The newest and the best checkpoint."""

    last_step: BigCount | None = None
    """Step of the newest complete checkpoint."""
    path: Annotated[str, Field(max_length=4096)] | None = None
    """Its folder, inside the actor's pods."""
    best_step: BigCount | None = None
    """Step of the best one."""
    best_reward: float | None = None
    """Its reward."""
    resumed_from: BigCount | None = None
    """Step from which the present actors resumed."""
    time: Time | None = None
    """When the newest was written."""


class DeviceStatus(StatusPart):
    """Accelerators that the processes of a pod found."""

    pod: Text
    """The pod."""
    node: Text = ""
    """Its node."""
    uuids: Annotated[list[Text], Field(max_length=64)] = []
    """Device UUIDs as reported by the driver."""


class Metric(StatusPart):
    """One metric of the newest step."""

    name: Text
    """Name as in metrics.jsonl."""
    value: Annotated[str, Field(max_length=64)]
    """Its value as text, because NaN and infinity have no JSON form."""


class PodEnds(StatusPart):
    """Recent ends of a pod, so that a restarted operator continues to count them."""

    name: Text
    """Name of the pod; `actor` for restarts of the actors, `stall` for actions on stalls."""
    uid: Text = ""
    """Uid of the pod whose end was counted last, so that no end is counted twice."""
    times: Annotated[list[Time], Field(max_length=8)] = []
    """Counted ends, oldest first."""
    backoff_seconds: Count = 0
    """Seconds between the last end and the replacement."""


class Draining(StatusPart):
    """A pod that is draining because the role was scaled down."""

    pod: Text
    """The pod."""
    since: Time
    """When draining began."""


class Halt(StatusPart):
    """Why the job is suspended."""

    by: Literal["user", "rule"] = "user"
    """user: spec.suspend is true. rule: a rule of failurePolicy with the action Pause, until the user suspends the job and resumes it."""
    rule: Text | None = None
    """Reason of the rule: KlBlowUp, RewardCollapse, NonFiniteLoss, PolicyMismatch or Stalled."""
    last_good_step: BigCount | None = None
    """Step of the newest checkpoint from before the metrics went wrong; the job resumes from it."""
    since: Time | None = None
    """When the suspension began; when it is done, when the last pod was gone."""
    done: bool = False
    """Whether all pods are gone."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Message of the rule."""


class Columns(StatusPart):
    """Text for printer columns, so that no column needs a JSONPath over a list."""

    step: Text | None = None
    """STEP: step/totalSteps, e.g. 12/200."""
    rollouts: Text | None = None
    """ROLLOUTS: ready/desired."""
    actors: Text | None = None
    """ACTOR: ready/desired."""
    envs: Text | None = None
    """ENV: ready/desired."""
    success: Text | None = None
    """SUCCESS: share of episodes with success."""
    reason: Text | None = None
    """REASON of the condition that explains the phase."""


class RLJobStatus(StatusPart):
    """The state of a job."""

    phase: Phase | None = None
    """Phase, for people; programs should read conditions."""
    schema_version: Text | None = None
    """Digest of the schema defaults with which the job was accepted and which it keeps; its ConfigMap holds them."""
    observed_generation: BigCount | None = None
    """metadata.generation the operator has acted on."""
    applied_generation: BigCount | None = None
    """metadata.generation whose settings the runner trains with."""
    key_id: Text | None = None
    """Id of the operator's master key from which the keys of the job are derived; it stays when the operator gets a new one."""
    epoch: Count | None = None
    """Number of the current start of the actors; it increases with each restart and resume."""
    begun_epoch: Count | None = None
    """Newest epoch in which training has begun; step and policyVersion are from it."""
    restarts: Count | None = None
    """Restarts of the actors that count towards failurePolicy.maxRestarts; finished steps reduce them (forgiveAfterSteps)."""
    forgive_at_step: BigCount | None = None
    """Step after which one restart no longer counts; absent while none is counted."""
    total_restarts: Count | None = None
    """All restarts of the actors, including disruptions."""
    step: BigCount | None = None
    """Last finished step; it may decrease when epoch increases."""
    total_steps: BigCount | None = None
    """Steps of the run."""
    policy_version: BigCount | None = None
    """Version of the newest weights."""
    reward: float | None = None
    """Mean reward of the last step; absent when it was not finite."""
    lag: Count | None = None
    """Versions by which the oldest ready rollout is behind."""
    start_time: Time | None = None
    """When the first pod was created."""
    completion_time: Time | None = None
    """When the job ended."""
    first_step_time: Time | None = None
    """When the first step was finished; the start deadline is met then."""
    suspended_seconds: BigCount | None = None
    """Seconds spent suspended until the last resume."""
    runtime_seconds: BigCount | None = None
    """Seconds that the job ran, without suspended time."""
    roles: Annotated[list[RoleStatus], Field(max_length=19)] = []
    """Pods by role."""
    rollout: RolloutScale | None = None
    """What `kubectl scale` reads."""
    columns: Columns | None = None
    """What `kubectl get` prints that no single field holds."""
    checkpoint: CheckpointStatus | None = None
    """The newest and the best checkpoint."""
    devices: Annotated[list[DeviceStatus], Field(max_length=2048)] = []
    """Accelerators by pod."""
    metrics: Annotated[list[Metric], Field(max_length=64)] = []
    """Metrics of the newest step."""
    busy: Annotated[list[Metric], Field(max_length=1024)] = []
    """Share of time in which each rollout had groups to generate, over the last minute, or the last four steps where those take longer."""
    ends: Annotated[list[PodEnds], Field(max_length=2048)] = []
    """Pods that ended recently."""
    draining: Annotated[list[Draining], Field(max_length=1024)] = []
    """Pods that are draining because the role was scaled down."""
    halt: Halt | None = None
    """Why the job is suspended, or is being suspended; absent while it may run."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Conditions of the job; all types are present from the first reconcile."""
