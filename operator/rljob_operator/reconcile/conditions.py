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
        "SpecAccepted": "the spec is understood, names are free and volumes fit",
        "InvalidSpec": "this operator's schema refuses the spec; the message names each field",
        "NameConflict": "an object of someone else holds a name the job needs",
        "NamespaceNotServed": "the namespace is that of the operator and its master key, where no job is served",
        "GangUnavailable": "the cluster cannot schedule the job's pods together as the job demands",
        "ImageMissing": "neither the job nor the operator names an image for a role",
        "VolumeClaimNotFound": "a PersistentVolumeClaim that a role mounts does not exist",
        "CheckpointNotMounted": "checkpoint.resumeFrom is on no volume of the actor",
        "VolumeNotShared": "several pods mount a claim that only one node may mount",
    },
    "Scheduled": {
        "PodsScheduled": "every wanted pod is bound to a node",
        "PodsPending": "pods are being made or wait for the scheduler's first look",
        "Unschedulable": "the scheduler finds no node; the message holds its words",
        "QuotaExceeded": "the namespace's quota refuses a pod; the message holds the API server's words",
        "CreateRefused": "the API server refuses an object (admission, policy, missing account); the message holds its words",
        "PreviousJobTerminating": "pods of an earlier job of the same name still hold the names",
        "RestartBackOff": "pods ended too often; their replacements wait",
        "NotAccepted": "no pods are made while Accepted is false",
        "Suspended": "the job is suspended",
        "Finished": "the job has ended",
    },
    "Ready": {
        "RanksReady": "the runner has all ranks of the actor",
        "WaitingForPods": "pods of the actor are not there yet",
        "Preparing": "init containers of the actor's pods run",
        "WaitingForRanks": "the actor's pods run, the runner waits for ranks",
        "ContainersWaiting": "a container of the actor cannot start; the message says why",
        "ImagePullError": "an image cannot be pulled; the message holds the kubelet's words",
        "InitContainerFailed": "an init container of the actor ended with an error",
        "Restarting": "the actor's gang is being replaced under a new epoch",
        "NotAccepted": "no pods are made while Accepted is false",
        "NotScheduled": "pods of the actor are not bound; see Scheduled",
        "Suspended": "the job is suspended",
        "Finished": "the job has ended",
    },
    "Progressing": {
        "StepFinished": "a step was finished within the stall bound",
        "NoStepYet": "the first step of this epoch is not finished",
        "Stalled": "no progress for longer than the stall bound; the message says who waits for whom",
        "RunnerUnreachable": "the runner does not answer; training may go on",
        "NotReady": "the runner is not there",
        "Suspended": "the job is suspended",
        "Finished": "the job has ended",
    },
    "WeightsInSync": {
        "InSync": "every ready rollout serves weights within the staleness bound",
        "RolloutsBehind": "a ready rollout serves weights older than the staleness bound",
        "WeightsDiverged": "a rollout scores text differently from the trainer with the same weights",
        "NoRollouts": "no rollout is ready",
        "RunnerUnreachable": "the runner does not answer",
        "NotReady": "the runner is not there",
        "Suspended": "the job is suspended",
        "Finished": "the job has ended",
    },
    "Degraded": {
        "AllRolesReady": "every role has its pods",
        "PodsMissing": "a role has fewer ready pods than wanted, at least its minimum",
        "BelowMinimum": "fewer rollouts than minReplicas are ready: the run waits",
        "PodEnded": "a rollout or env pod ended and is replaced; the message holds its last words",
        "RestartBackOff": "a pod ended more than 5 times in 10 minutes; its replacement waits",
        "ChangeRefused": "the runner refuses the changed spec; the message holds its words, and the run goes on as before",
        "NotRunning": "the job does not run, so nothing is missing",
    },
    "Suspended": {
        "NotSuspended": "the job may run",
        "Resumed": "the job was suspended and goes on",
        "Suspending": "the runner saves a checkpoint, then all pods are deleted",
        "Suspended": "spec.suspend is true: no pods, no devices held",
        "Pausing": "a rule of failurePolicy suspends the job; the message says which",
        "Paused": "a rule of failurePolicy suspended the job until somebody suspends and resumes it",
    },
    "Complete": {
        "NotFinished": "the job has not finished",
        "TrainingFinished": "all steps were done",
    },
    "Failed": {
        "NotFailed": "nothing has failed",
        "PodFailed": "a pod ended with an error; on False: the actor's gang was restarted for it",
        "PodDisrupted": "the cluster ended a pod (drain, preemption, taint); on False: the gang was restarted for it",
        "PodDeleted": "someone deleted a pod; on False: the gang was restarted for it, not counted",
        "OutOfMemory": "a container was killed for its memory limit; on False: the gang was restarted for it",
        "InitContainerFailed": "an init container ended with an error; on False: the gang was restarted for it",
        "Stalled": "no progress; on False: the job or a role was restarted for it",
        "NonFiniteLoss": "the loss was not finite; on False: the job went back to its checkpoint",
        "RewardCollapse": "the reward stayed low; on False: the job went back to its checkpoint",
        "KlBlowUp": "the policy ran away; on False: the job went back to its checkpoint",
        "PolicyMismatch": "engine and trainer disagreed about what was sampled; on False: the job went back to its checkpoint",
        "InvalidConfiguration": "a process ended with code 2: settings that no restart heals",
        "DataError": "a process ended with code 4: data that no restart heals",
        "FailurePolicyRule": "a rule of failurePolicy says FailJob",
        "MaxRestartsExceeded": "failurePolicy.maxRestarts are used up",
        "DeadlineExceeded": "activeDeadlineSeconds or startDeadlineSeconds has passed",
    },
}
"""Condition -> reason -> meaning. docs/operations.md has a section per reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """What a condition says now."""

    status: str
    """True, False or Unknown."""
    reason: str
    message: str = ""


def merge(
    before: Mapping[str, Object], facts: Mapping[str, Fact], *, now: float, generation: int
) -> list[dict[str, Any]]:
    """Return the list of conditions: lastTransitionTime moves with `status` only."""
    merged = []
    for kind in TYPES:
        fact, old = facts[kind], before.get(kind, {})
        same = old.get("status") == fact.status and isinstance(old.get("lastTransitionTime"), str)
        message = fact.message if len(fact.message) <= LONGEST_MESSAGE else fact.message[: LONGEST_MESSAGE - 3] + "..."
        merged.append(
            {
                "type": kind,
                "status": fact.status,
                "reason": fact.reason,
                "message": message,
                "lastTransitionTime": old["lastTransitionTime"] if same else to_text(now),
                "observedGeneration": generation,
            }
        )
    return merged
