"""`status` of an RLJob: what the operator writes and people, scripts and `kubectl wait` read.

Written by the operator alone, so unknown fields are ignored on reading: a status written by a newer operator stays readable.
Times are RFC 3339 text in UTC.
"""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec
from rl_core.api.roles import RoleName

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


class StatusPart(Spec):
    """The base of the parts of a status: unknown fields are ignored."""

    model_config = Spec.model_config | {"extra": "ignore"}


class Condition(StatusPart):
    """One fact about the job; all types are there from the first reconcile."""

    type: ConditionType
    """Which fact."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Why, as one word; docs/operations.md has a section per reason."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Why, for people; the cluster's own words where it refused something."""
    last_transition_time: Time
    """When `status` changed last."""
    observed_generation: BigCount | None = None
    """metadata.generation this was computed from."""


class RoleStatus(StatusPart):
    """Pods of one role."""

    name: RoleName
    """The role."""
    desired: Count = 0
    """Pods wanted."""
    ready: Count = 0
    """Pods that serve."""
    active: Count = 0
    """Pods that exist and have not ended."""
    failed: Count = 0
    """Ends with an error so far."""
    min_version: BigCount | None = None
    """Oldest policy version among ready rollouts."""
    max_version: BigCount | None = None
    """Newest policy version among ready rollouts."""
    restarts: Count = 0
    """Pods of the role that were replaced after they ended."""
    restart_time: Time | None = None
    """Pods of the role created up to then are replaced (RestartRole)."""


class RolloutScale(StatusPart):
    """What `kubectl scale` and an autoscaler read."""

    replicas: Count = 0
    """Rollout pods that exist and have not ended."""
    ready_replicas: Count = 0
    """Those of them that serve."""
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
    """Step that the present gang went on from."""
    time: Time | None = None
    """When the newest was written."""


class DeviceStatus(StatusPart):
    """Accelerators that a pod's processes found."""

    pod: Text
    """The pod."""
    node: Text = ""
    """Its node."""
    uuids: Annotated[list[Text], Field(max_length=64)] = []
    """Device UUIDs as the driver tells them."""


class Metric(StatusPart):
    """One number of the newest step."""

    name: Text
    """Name as in metrics.jsonl."""
    value: Annotated[str, Field(max_length=64)]
    """Its value as text, because NaN and infinity have no JSON form."""


class PodEnds(StatusPart):
    """When a pod ended lately, so that a restarted operator counts on where the old one stopped."""

    name: Text
    """The pod; `actor` for the gang as a whole, `stall` for acts on stalls."""
    uid: Text = ""
    """The pod judged last: no end is counted twice."""
    times: Annotated[list[Time], Field(max_length=8)] = []
    """Counted ends, oldest first."""
    backoff_seconds: Count = 0
    """Seconds from the last of them until the replacement is made."""


class Draining(StatusPart):
    """A pod that scaling down asked to finish."""

    pod: Text
    """The pod."""
    since: Time
    """When it was asked first."""


class Halt(StatusPart):
    """Why the job is to have no pods."""

    by: Literal["user", "rule"] = "user"
    """user: spec.suspend; rule: a rule of failurePolicy says Pause, until the user suspends the job and resumes it."""
    rule: Text | None = None
    """The reason that the rule gave: KlBlowUp, RewardCollapse, NonFiniteLoss, PolicyMismatch or Stalled."""
    last_good_step: BigCount | None = None
    """Step of the newest checkpoint from before the numbers went wrong, from which the job goes on."""
    since: Time | None = None
    """When it began, and when the last pod was gone."""
    done: bool = False
    """Whether no pod is left."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """What the rule found."""


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
    reason: Text | None = None
    """REASON of the condition that explains the phase."""


class RLJobStatus(StatusPart):
    """The state of a job."""

    phase: Phase | None = None
    """For people; programs read conditions."""
    schema_version: Text | None = None
    """Digest of the defaults that the job was accepted under and keeps; its ConfigMap has them."""
    observed_generation: BigCount | None = None
    """metadata.generation the operator has acted on."""
    applied_generation: BigCount | None = None
    """metadata.generation whose settings the runner trains with."""
    key_id: Text | None = None
    """Id of the operator's master key that the job's keys are made from; it stays when the operator gets another."""
    epoch: Count | None = None
    """Number of the actor gang; rises with each restart and resume."""
    begun_epoch: Count | None = None
    """The newest epoch whose loop has begun: its step and version are those of the run."""
    restarts: Count | None = None
    """Restarts of the actor gang that count towards failurePolicy.maxRestarts; finished steps give them back (forgiveAfterSteps)."""
    forgive_at_step: BigCount | None = None
    """The step that gives one of them back when it is finished; absent while none is counted."""
    total_restarts: Count | None = None
    """All restarts of the actor gang, disruptions too."""
    step: BigCount | None = None
    """Last finished step; may fall when epoch rises."""
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
    """Seconds it ran, suspended time left out."""
    roles: Annotated[list[RoleStatus], Field(max_length=3)] = []
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
    """Numbers of the newest step."""
    busy: Annotated[list[Metric], Field(max_length=1024)] = []
    """Share of the last minute, or of four longer steps, in which each rollout held groups."""
    ends: Annotated[list[PodEnds], Field(max_length=2048)] = []
    """Pods that ended lately."""
    draining: Annotated[list[Draining], Field(max_length=1024)] = []
    """Pods that scaling down asked to finish."""
    halt: Halt | None = None
    """Why the job has no pods, or loses them now; absent while it may run."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """The facts; all types from the first reconcile."""
