"""Kubernetes events of a job. They are derived from the difference between the old and the new status, so each is written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_operator.model import JobEvent, Object
from rljob_operator.reconcile.condition_facts import NOT_DURABLE
from rljob_operator.reconcile.conditions import Fact
from rljob_operator.reconcile.failures import Act
from rljob_operator.reconcile.lifecycle import Decision, Stage
from rljob_operator.reconcile.record import Record

LONGEST_EVENT = 1000
"""Characters of an event; the API server takes 1024."""

EVENTS: Mapping[str, str] = {
    "Starting": "all pods of the actor are bound to nodes",
    "Running": "the training loop is running",
    "Restarting": "the actor's gang is being replaced for a new attempt; the message gives the cause",
    "Resumed": "a suspended job resumes as a new attempt",
    "Suspending": "the runner saves a checkpoint, then all pods are deleted",
    "Suspended": "all pods are deleted",
    "Succeeded": "all training steps are finished",
    "Failed": "the job failed; the message gives the cause",
    "CheckpointsNotDurable": "checkpoint.path is not on a PersistentVolumeClaim: a restart of the actor loses all progress",
    "DefaultsLost": "the ConfigMap with the defaults that the job was accepted under is missing or was edited",
    "Draining": "surplus pods finish their work before they are deleted",
    "Autoscaled": "rollout.autoscale changed the number of rollouts; the message has the numbers",
    "AutoscaleRefused": "the API server rejected a change by rollout.autoscale; the message quotes it",
    "StatusRefused": "the API server refused the status of the job, so that an older one is shown; the message quotes it",
    "PodReplaced": "a rollout or env pod ended and is being replaced; the message has its last log lines",
    "RoleRestarted": "all pods of a role are being replaced; the message gives the cause",
}
"""Reasons of events, besides the reasons of conditions that turn unhealthy. docs/runbook.md lists both."""

_EVENT_STATUS = {
    "Accepted": ("False", ()),
    "Scheduled": ("False", ("PodsPending", "NotAccepted", "Suspended", "Finished")),
    "Ready": (
        "False",
        (
            "WaitingForPods",
            "Preparing",
            "WaitingForRanks",
            "Restarting",
            "NotAccepted",
            "NotScheduled",
            "NotReady",
            "Suspended",
            "Finished",
        ),
    ),
    "Progressing": ("Unknown", ("NotReady", "NoStepYet")),
    "WeightsInSync": ("False", ()),
    "Degraded": ("True", ("PodEnded",)),
}
"""Condition -> the status worth an event, and reasons of it that are none."""


def of_transition(
    record: Record, decision: Decision, facts: Mapping[str, Fact], status: Object | None
) -> tuple[JobEvent, ...]:
    """Return the events of the transition from `record` to the new `status`; none when the status is unchanged (None)."""
    if status is None or decision.stage is Stage.ENDED:
        return ()
    return (
        *_schema(record, status),
        *_phase(record, decision, status),
        *_findings(decision),
        *_conditions(record, facts),
        *_draining(record, status),
    )


def of_refused_spec(problem: str) -> tuple[JobEvent, ...]:
    """Return the event about an invalid spec."""
    return (_warning("InvalidSpec", problem),)


def _schema(record: Record, status: Object) -> Iterator[JobEvent]:
    old_version, new_version = record.raw.get("schemaVersion"), status.get("schemaVersion")
    if old_version and new_version != old_version:
        yield _warning(
            "DefaultsLost",
            f"the job's ConfigMap must have the defaults of schema {old_version}, under which the job was accepted, got none; the operator uses the "
            f"defaults of schema {new_version} instead: compare them in the ConfigMap with what the job needs, and set what differs in the spec",
        )


def _phase(record: Record, decision: Decision, status: Object) -> Iterator[JobEvent]:
    phase = str(status.get("phase"))
    if not record.phase and decision.stage is Stage.RUN:
        accepted: Object = next((c for c in status["conditions"] if c["type"] == "Accepted"), {})
        if accepted.get("message") == NOT_DURABLE:
            yield _warning("CheckpointsNotDurable", NOT_DURABLE)
    if phase == record.phase and decision.stage is not Stage.RESTART:
        return
    if decision.stage is Stage.RESTART:
        resumed = decision.reason == "Resumed"
        yield _normal("Resumed", decision.message) if resumed else _warning("Restarting", decision.message)
    elif phase == "Failed":
        yield _warning("Failed", f"{decision.reason}: {decision.message}")
    elif phase in EVENTS:
        yield _normal(phase, decision.message or EVENTS[phase])


def _findings(decision: Decision) -> Iterator[JobEvent]:
    reasons = {Act.REPLACE_PODS: "PodReplaced", Act.RESTART_ROLE: "RoleRestarted"}
    for finding in decision.findings if decision.stage is Stage.RUN else ():
        if finding.act in reasons:
            yield _warning(reasons[finding.act], finding.message)


def _conditions(record: Record, facts: Mapping[str, Fact]) -> Iterator[JobEvent]:
    for kind, (status, silent) in _EVENT_STATUS.items():
        fact = facts[kind]
        if (
            fact.status == status
            and fact.reason not in silent
            and record.condition(kind)[:2] != (fact.status, fact.reason)
        ):
            yield _warning(fact.reason, fact.message or fact.reason)
    stalled = facts["Progressing"]
    if stalled.reason == "Stalled" and record.condition("Progressing")[1] != "Stalled":
        yield _warning("Stalled", stalled.message)


def _draining(record: Record, status: Object) -> Iterator[JobEvent]:
    listed: Any = status.get("draining") or []
    new = [entry["pod"] for entry in listed if entry["pod"] not in record.draining]
    if new:
        yield _normal("Draining", f"{', '.join(new)} will finish their work before they are deleted")


def _warning(reason: str, message: str) -> JobEvent:
    return JobEvent(type="Warning", reason=reason, message=message[:LONGEST_EVENT])


def _normal(reason: str, message: str) -> JobEvent:
    return JobEvent(type="Normal", reason=reason, message=message[:LONGEST_EVENT])
