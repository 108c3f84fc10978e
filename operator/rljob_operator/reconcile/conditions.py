"""The conditions of a job: the table of reasons, and how new facts are merged into the list of the status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from rl_core.api.status import ConditionType
from rljob_operator.model import Object
from rljob_operator.times import to_text

TYPES: tuple[str, ...] = get_args(ConditionType)
"""All conditions, in the order of the list; each is there from the first reconcile."""
LONGEST_MESSAGE = 4000

REASONS: Mapping[str, Mapping[str, str]] = {
    "Accepted": {
        "SpecAccepted": "the spec is valid, all names are free and all volumes can be mounted",
        "InvalidSpec": "the schema of this operator rejects the spec; the message names each field",
        "NameConflict": "an object that the job does not own has a name that the job needs",
        "NamespaceNotServed": "the job is in the namespace of the operator and its master key, where no jobs run",
        "GangUnavailable": "the cluster does not serve the gang scheduling API that the job requires",
        "ImageMissing": "neither the job nor the operator sets an image for a role",
        "VolumeClaimNotFound": "a PersistentVolumeClaim that a role mounts does not exist",
        "CheckpointNotMounted": "checkpoint.resumeFrom is not on a volume that the actor mounts",
        "VolumeNotShared": "several pods mount a claim whose access modes allow only one node",
    },
    "Scheduled": {
        "PodsScheduled": "every desired pod is bound to a node",
        "PodsPending": "pods are being created, or the scheduler has not processed them yet",
        "Unschedulable": "the scheduler finds no node for a pod; the message quotes the scheduler",
        "QuotaExceeded": "a quota of the namespace rejects a pod; the message quotes the API server",
        "CreateRefused": "the API server rejects an object (admission, policy, missing account); the message quotes it",
        "PreviousJobTerminating": "pods of a deleted job of the same name still exist",
        "RestartBackOff": "pods ended too often; their replacements are delayed",
        "NotAccepted": "no pods are created while Accepted is False",
        "Suspended": "the job is suspended",
        "Finished": "the job has finished",
    },
    "Ready": {
        "RanksReady": "all ranks of the actor are registered with the runner",
        "WaitingForPods": "pods of the actor do not exist or are not bound yet",
        "Preparing": "init containers of the actor's pods are running",
        "WaitingForRanks": "the actor's pods are running and the runner waits for ranks",
        "ContainersWaiting": "a container of the actor cannot start; the message gives the cause",
        "ImagePullError": "an image cannot be pulled; the message quotes the kubelet",
        "InitContainerFailed": "an init container of the actor failed",
        "Restarting": "the actor's gang is being replaced for a new attempt",
        "NotAccepted": "no pods are created while Accepted is False",
        "NotScheduled": "pods of the actor are not bound to nodes; see Scheduled",
        "Suspended": "the job is suspended",
        "Finished": "the job has finished",
    },
    "Progressing": {
        "StepFinished": "a step was finished within the stall timeout",
        "NoStepYet": "the first step of this attempt is not finished yet",
        "Stalled": "there was no progress for longer than the stall timeout; the message lists which members wait and what each waits for",
        "RunnerUnreachable": "the operator cannot reach the runner; training may continue",
        "NotReady": "the runner is not running yet",
        "Suspended": "the job is suspended",
        "Finished": "the job has finished",
    },
    "WeightsInSync": {
        "InSync": "every ready rollout serves weights within the staleness bound",
        "RolloutsBehind": "a ready rollout serves weights that are older than the staleness bound",
        "WeightsDiverged": "with the same weights, a rollout computes other log-probabilities than the trainer",
        "NoRollouts": "no rollout is ready",
        "RunnerUnreachable": "the operator cannot reach the runner",
        "NotReady": "the runner is not running yet",
        "Suspended": "the job is suspended",
        "Finished": "the job has finished",
    },
    "Degraded": {
        "AllRolesReady": "every role has its desired number of ready pods",
        "PodsMissing": "a role has fewer ready pods than desired, but at least its minimum",
        "BelowMinimum": "fewer rollouts than minReplicas are ready, and the run waits",
        "PodEnded": "a rollout or env pod ended and is being replaced; the message has its last log lines",
        "RestartBackOff": "a pod ended more than 5 times in 10 minutes; its replacement is delayed",
        "ChangeRefused": "the runner rejects the changed spec and keeps the previous one; the message quotes the runner",
        "NotRunning": "the job is not running, so no pods are missing",
    },
    "Suspended": {
        "NotSuspended": "the job is not suspended",
        "Resumed": "the job was suspended and has resumed",
        "Suspending": "the runner saves a checkpoint, then all pods are deleted",
        "Suspended": "spec.suspend is true; the job has no pods and holds no devices",
        "Pausing": "a rule of failurePolicy is suspending the job; the message names the rule",
        "Paused": "a rule of failurePolicy suspended the job until a user suspends and resumes it",
    },
    "Complete": {
        "NotFinished": "the job has not finished",
        "TrainingFinished": "all training steps are finished",
    },
    "Failed": {
        "NotFailed": "nothing has failed",
        "PodFailed": "a pod failed; if False, the actor's gang was restarted because of it",
        "PodDisrupted": "the cluster evicted a pod (drain, preemption, taint); if False, the gang was restarted because of it",
        "PodDeleted": "another client deleted a pod; if False, the gang was restarted because of it, not counted",
        "OutOfMemory": "a container exceeded its memory limit; if False, the gang was restarted because of it",
        "InitContainerFailed": "an init container failed; if False, the gang was restarted because of it",
        "Stalled": "there was no progress; if False, the job or a role was restarted because of it",
        "NonFiniteLoss": "the loss was not finite; if False, the job restarted from its checkpoint",
        "RewardCollapse": "the reward stayed low; if False, the job restarted from its checkpoint",
        "KlBlowUp": "the KL divergence exceeded its bound; if False, the job restarted from its checkpoint",
        "PolicyMismatch": "engine and trainer disagreed on log-probabilities; if False, the job restarted from its checkpoint",
        "InvalidConfiguration": "a process exited with code 2: the configuration is invalid, which a restart cannot repair",
        "DataError": "a process exited with code 4: the data is invalid, which a restart cannot repair",
        "FailurePolicyRule": "a rule of failurePolicy has the action FailJob",
        "MaxRestartsExceeded": "all restarts of failurePolicy.maxRestarts are used",
        "DeadlineExceeded": "activeDeadlineSeconds or startDeadlineSeconds has passed",
    },
}
"""Condition -> reason -> meaning. docs/runbook.md explains each reason and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """The new status, reason and message of a condition."""

    status: str
    """True, False or Unknown."""
    reason: str
    message: str = ""


def merge(
    before: Mapping[str, Object], facts: Mapping[str, Fact], *, now: float, generation: int
) -> list[dict[str, Any]]:
    """Return the list of conditions with new facts. lastTransitionTime changes only with `status`. `now` is in seconds since 1970."""
    merged = []
    for kind in TYPES:
        fact, old = facts[kind], before.get(kind, {})
        unchanged = old.get("status") == fact.status and isinstance(old.get("lastTransitionTime"), str)
        message = fact.message if len(fact.message) <= LONGEST_MESSAGE else fact.message[: LONGEST_MESSAGE - 3] + "..."
        merged.append(
            {
                "type": kind,
                "status": fact.status,
                "reason": fact.reason,
                "message": message,
                "lastTransitionTime": old["lastTransitionTime"] if unchanged else to_text(now),
                "observedGeneration": generation,
            }
        )
    return merged
