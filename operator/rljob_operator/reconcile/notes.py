"""Events: what `kubectl describe` shows of a job's life. Made of the step from the old status to the new, so each is written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_operator.model import EventNote, Object
from rljob_operator.reconcile.condition_facts import NOT_DURABLE
from rljob_operator.reconcile.conditions import Fact
from rljob_operator.reconcile.failures import Act
from rljob_operator.reconcile.lifecycle import Course, Stage
from rljob_operator.reconcile.record import Record

LONGEST_NOTE = 1000
"""Characters of an event; the API server takes 1024."""

EVENTS: Mapping[str, str] = {
    "Starting": "all pods of the actor are bound",
    "Running": "the runner's loop runs",
    "Restarting": "the actor's gang is replaced under a new epoch; the message says why",
    "Resumed": "a suspended job goes on under a new epoch",
    "Suspending": "the runner saves, then all pods are deleted",
    "Suspended": "no pods are left",
    "Succeeded": "all steps were done",
    "Failed": "the job has failed; the message says why",
    "CheckpointsNotDurable": "checkpoint.path is on no volume of a claim: a restart of the actor begins anew",
    "DefaultsLost": "the ConfigMap with the defaults that the job was accepted under is gone or was edited",
    "Draining": "surplus pods finish their work before they are deleted",
    "Autoscaled": "rollout.autoscale set another number of rollouts; the message holds the numbers",
    "AutoscaleRefused": "the API server refused it; the message holds its words",
    "PodReplaced": "a rollout or env pod ended and is replaced; the message holds its last words",
    "RoleRestarted": "all pods of a role are replaced; the message says why",
}
"""Reasons of events besides those of conditions, which become events when they turn to the bad. docs/operations.md lists both."""

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


def tell(record: Record, course: Course, facts: Mapping[str, Fact], status: Object | None) -> tuple[EventNote, ...]:
    """Return the events of a step; none when the status stays as it is."""
    if status is None or course.stage is Stage.ENDED:
        return ()
    return (
        *_schema(record, status),
        *_phase(record, course, status),
        *_findings(course),
        *_conditions(record, facts),
        *_draining(record, status),
    )


def refusal(problem: str) -> tuple[EventNote, ...]:
    """Return the event about a spec that is not understood."""
    return (_warn("InvalidSpec", problem),)


def _schema(record: Record, status: Object) -> Iterator[EventNote]:
    before, now = record.raw.get("schemaVersion"), status.get("schemaVersion")
    if before and now != before:
        yield _warn(
            "DefaultsLost",
            f"the job's ConfigMap must keep the defaults of schema {before}, under which it was accepted, got none; it is resolved by "
            f"those of schema {now}: compare `kubectl get configmap` with what the job needs and write into the spec what differs",
        )


def _phase(record: Record, course: Course, status: Object) -> Iterator[EventNote]:
    phase = str(status.get("phase"))
    if not record.phase and course.stage is Stage.RUN:
        accepted: Object = next((c for c in status["conditions"] if c["type"] == "Accepted"), {})
        if accepted.get("message") == NOT_DURABLE:
            yield _warn("CheckpointsNotDurable", NOT_DURABLE)
    if phase == record.phase and course.stage is not Stage.RESTART:
        return
    if course.stage is Stage.RESTART:
        resumed = course.reason == "Resumed"
        yield _note("Resumed", course.message) if resumed else _warn("Restarting", course.message)
    elif phase == "Failed":
        yield _warn("Failed", f"{course.reason}: {course.message}")
    elif phase in EVENTS:
        yield _note(phase, course.message or EVENTS[phase])


def _findings(course: Course) -> Iterator[EventNote]:
    reasons = {Act.REPLACE_PODS: "PodReplaced", Act.RESTART_ROLE: "RoleRestarted"}
    for finding in course.findings if course.stage is Stage.RUN else ():
        if finding.act in reasons:
            yield _warn(reasons[finding.act], finding.message)


def _conditions(record: Record, facts: Mapping[str, Fact]) -> Iterator[EventNote]:
    for kind, (status, silent) in _EVENT_STATUS.items():
        fact = facts[kind]
        if (
            fact.status == status
            and fact.reason not in silent
            and record.condition(kind)[:2] != (fact.status, fact.reason)
        ):
            yield _warn(fact.reason, fact.message or fact.reason)
    stalled = facts["Progressing"]
    if stalled.reason == "Stalled" and record.condition("Progressing")[1] != "Stalled":
        yield _warn("Stalled", stalled.message)


def _draining(record: Record, status: Object) -> Iterator[EventNote]:
    listed: Any = status.get("draining") or []
    new = [entry["pod"] for entry in listed if entry["pod"] not in record.draining]
    if new:
        yield _note("Draining", f"{', '.join(new)} finish their work before they are deleted")


def _warn(reason: str, message: str) -> EventNote:
    return EventNote(type="Warning", reason=reason, message=message[:LONGEST_NOTE])


def _note(reason: str, message: str) -> EventNote:
    return EventNote(type="Normal", reason=reason, message=message[:LONGEST_NOTE])
