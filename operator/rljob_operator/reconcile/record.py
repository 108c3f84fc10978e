"""The counters and timestamps in the status of a job, which must survive a restart of the operator.

Invalid fields, as another version or a user may have written them, are replaced by defaults. A decision returns a changed copy, which
is written to the status before any other effect of the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.plan.failure_rules import PodFailures
from rl_core.plan.groups import CONTROL_GROUP
from rljob_operator.model import Object
from rljob_operator.times import to_seconds, to_text

LONGEST_MESSAGE = 4096
"""Characters of `status.halt.message`."""

TERMINAL = frozenset({"Succeeded", "Failed"})
GANG, STALL = CONTROL_GROUP, "stall"
"""Keys of `pod_failures` that are not pods: restarts of the gangs, and actions on stalls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRecord:
    """Counters of one role."""

    active: int = 0
    """Pods that existed and had not ended when the status was written."""
    failed: int = 0
    """PodFailures with an error so far."""
    restarts: int = 0
    """Number of replaced pods, which is the attempt in the incarnation of the next pods."""
    restart_time: float | None = None
    """Pods that were created up to this time are replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspension:
    """A suspension by the user, or a pause by a failure rule (`status.halt`). The user ends a pause by suspending and resuming the job."""

    rule: str = ""
    """The reason of the rule, for example KlBlowUp; empty when the user suspended the job."""
    last_good_step: int | None = None
    """Step of the newest checkpoint of a paused job; None when there is none or the runner did not report it."""
    since: float
    """Time of the beginning, or, when it is done, the time at which the last pod was deleted."""
    done: bool = False
    """Whether no pod is left."""
    message: str = ""
    """The message of the rule."""

    @property
    def saves(self) -> bool:
        """Return whether the runner saves a checkpoint. It does not when a rule on metrics paused the job."""
        return self.rule in ("", "Stalled")

    @property
    def explanation(self) -> str:
        """Return a message about a pause by a rule and how to end it; empty for a suspension by the user."""
        if not self.rule:
            return ""
        step = "" if self.last_good_step is None else f"; the last good checkpoint is at step {self.last_good_step}"
        return (
            f"paused by failurePolicy: {self.message}{step}; to resume from it, set suspend to true, wait until the job is suspended, and set "
            "suspend to false (rljob resume does both)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The part of a status that the operator reads back."""

    raw: Object = field(default_factory=dict)
    """The status as read. Some of its fields are copied unchanged."""
    phase: str = ""
    """Empty before the first reconcile."""
    epoch: int = 0
    restarts: int = 0
    total_restarts: int = 0
    forgive_at: int | None = None
    """The step at which a counted restart is restored; None when there is none to restore."""
    start_time: float | None = None
    first_step_time: float | None = None
    completion_time: float | None = None
    suspended_seconds: int = 0
    roles: Mapping[str, RoleRecord] = field(default_factory=dict)
    pod_failures: Mapping[str, PodFailures] = field(default_factory=dict)
    draining: Mapping[str, float] = field(default_factory=dict)
    begun_epoch: int = 0
    """The newest epoch whose training loop has begun."""
    suspension: Suspension | None = None
    """The suspension of the job; None when the job may run."""
    conditions: Mapping[str, Object] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Return whether the job has ended for good."""
        return self.phase in TERMINAL

    def role(self, name: str) -> RoleRecord:
        """Return the counters of a role."""
        return self.roles.get(name) or RoleRecord()

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return (status, reason, message) of a condition; Unknown and empty before the first reconcile."""
        condition = self.conditions.get(kind, {})
        return (
            str(condition.get("status", "Unknown")),
            str(condition.get("reason", "")),
            str(condition.get("message", "")),
        )

    @property
    def begun(self) -> bool:
        """Whether the runner's training loop has begun in the recorded epoch."""
        return 0 < self.epoch == self.begun_epoch


def read(status: Any) -> Record:
    """Return the record of a status. Invalid fields are treated as absent."""
    raw: Object = status if isinstance(status, Mapping) else {}
    phase = raw.get("phase")
    return Record(
        raw=raw,
        phase=phase if isinstance(phase, str) else "",
        epoch=_count(raw.get("epoch")),
        restarts=_count(raw.get("restarts")),
        total_restarts=_count(raw.get("totalRestarts")),
        forgive_at=_count(raw.get("forgiveAtStep")) or None,
        start_time=to_seconds(raw.get("startTime")),
        first_step_time=to_seconds(raw.get("firstStepTime")),
        completion_time=to_seconds(raw.get("completionTime")),
        suspended_seconds=_count(raw.get("suspendedSeconds")),
        roles={str(role.get("name")): _role(role) for role in _maps(raw.get("roles"))},
        pod_failures={str(entry.get("name")): _ends(entry) for entry in _maps(raw.get("ends"))},
        draining={str(d.get("pod")): to_seconds(d.get("since")) or 0.0 for d in _maps(raw.get("draining"))},
        begun_epoch=_count(raw.get("begunEpoch")),
        suspension=_suspension(raw.get("halt")) or _suspension_of_conditions(raw),
        conditions={str(c.get("type")): c for c in _maps(raw.get("conditions"))},
    )


def pod_failures_status(failures: Mapping[str, PodFailures]) -> list[dict[str, Any]]:
    """Return `status.ends`, sorted by name."""
    return [
        {
            "name": name,
            **({"uid": entry.uid} if entry.uid else {}),
            **({"times": [to_text(seconds) for seconds in entry.times]} if entry.times else {}),
            **({"backoffSeconds": int(entry.backoff)} if entry.backoff else {}),
        }
        for name, entry in sorted(failures.items())
    ]


def draining_status(draining: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return `status.draining`, sorted by pod."""
    return [{"pod": pod, "since": to_text(since)} for pod, since in sorted(draining.items())]


def suspension_status(suspension: Suspension) -> dict[str, Any]:
    """Return `status.halt`."""
    return {
        "by": "rule" if suspension.rule else "user",
        **({"rule": suspension.rule} if suspension.rule else {}),
        **({"lastGoodStep": suspension.last_good_step} if suspension.last_good_step is not None else {}),
        "since": to_text(suspension.since),
        "done": suspension.done,
        **({"message": suspension.message[:LONGEST_MESSAGE]} if suspension.message else {}),
    }


def _suspension(value: Any) -> Suspension | None:
    if not isinstance(value, Mapping):
        return None
    return Suspension(
        rule=str(value.get("rule") or "Paused") if value.get("by") == "rule" else "",
        last_good_step=_count(value["lastGoodStep"]) if "lastGoodStep" in value else None,
        since=to_seconds(value.get("since")) or 0.0,
        done=value.get("done") is True,
        message=str(value.get("message") or ""),
    )


def _suspension_of_conditions(raw: Object) -> Suspension | None:
    """Return the suspension from the condition Suspended, for a status without `halt`: an upgrade must not resume a paused job."""
    if "halt" in raw or "begunEpoch" in raw or not raw.get("phase"):
        return None
    condition = next((c for c in _maps(raw.get("conditions")) if c.get("type") == "Suspended"), {})
    if condition.get("status") not in ("True", "Unknown"):
        return None
    return Suspension(
        rule="Paused" if condition.get("reason") in ("Pausing", "Paused") else "",
        since=to_seconds(condition.get("lastTransitionTime")) or 0.0,
        done=condition["status"] == "True",
        message=str(condition.get("message") or ""),
    )


def _role(value: Object) -> RoleRecord:
    return RoleRecord(
        active=_count(value.get("active")),
        failed=_count(value.get("failed")),
        restarts=_count(value.get("restarts")),
        restart_time=to_seconds(value.get("restartTime")),
    )


def _ends(value: Object) -> PodFailures:
    times = value.get("times")
    read_times = [to_seconds(seconds) for seconds in times] if isinstance(times, list) else []
    return PodFailures(
        uid=str(value.get("uid") or ""),
        times=tuple(seconds for seconds in read_times if seconds is not None),
        backoff=float(_count(value.get("backoffSeconds"))),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _maps(value: Any) -> list[Object]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
