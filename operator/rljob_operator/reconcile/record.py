"""What the job's status remembers: the counters and marks that must survive a restart of the operator.

Read leniently: a status written by another version, or by hand, gives defaults where it makes no sense. Decisions return a changed
copy, which the status is written from before anything else is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.plan.failure_rules import Ends
from rl_core.plan.groups import CONTROL_GROUP
from rljob_operator.model import Object
from rljob_operator.times import to_seconds, to_text

TERMINAL = frozenset({"Succeeded", "Failed"})
GANG, STALL = CONTROL_GROUP, "stall"
"""Keys of `pod_failures` that are not pods: restarts of the gangs, and actions on stalls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRecord:
    """Counters of one role."""

    active: int = 0
    """Pods that existed and had not ended when the status was written."""
    failed: int = 0
    """Ends with an error so far."""
    restarts: int = 0
    """Pods replaced so far; the attempt in the incarnation of those made next."""
    restart_time: float | None = None
    """Pods created up to then are replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspension:
    """Why the job is to have no pods (`status.halt`). A pause by a rule ends when the user suspends the job and resumes it."""

    rule: str = ""
    """The reason a rule gave, KlBlowUp or the like; empty = the user's suspend."""
    last_good_step: int | None = None
    """Step of the newest checkpoint that the runner of a paused job left; None = it left none, or no word."""
    since: float
    """When it began, and once it is done when the last pod was gone."""
    done: bool = False
    """Whether no pod is left."""
    message: str = ""
    """What the rule found."""

    @property
    def saves(self) -> bool:
        """Return whether the runner's present state is worth a checkpoint: not where a rule finds its numbers wrong."""
        return self.rule in ("", "Stalled")

    @property
    def words(self) -> str:
        """Return why, and what to do, for people; empty for the user's suspend."""
        if not self.rule:
            return ""
        step = "" if self.last_good_step is None else f"; the last good checkpoint is at step {self.last_good_step}"
        return (
            f"paused by failurePolicy: {self.message}{step}; to resume from it, set suspend to true, wait until the job is suspended, and set "
            "suspend to false (rljob resume does both)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The remembered half of a status."""

    raw: Object = field(default_factory=dict)
    """The status as read, for what is carried over untouched."""
    phase: str = ""
    """Empty before the first reconcile."""
    epoch: int = 0
    restarts: int = 0
    total_restarts: int = 0
    forgive_at: int | None = None
    """The step that gives a counted restart back; None = there is none to give."""
    start_time: float | None = None
    first_step_time: float | None = None
    completion_time: float | None = None
    suspended_seconds: int = 0
    roles: Mapping[str, RoleRecord] = field(default_factory=dict)
    pod_failures: Mapping[str, Ends] = field(default_factory=dict)
    draining: Mapping[str, float] = field(default_factory=dict)
    begun_epoch: int = 0
    """The newest epoch whose loop has begun."""
    suspension: Suspension | None = None
    """Why the job is to have no pods; None = it may run."""
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
        found = self.conditions.get(kind, {})
        return str(found.get("status", "Unknown")), str(found.get("reason", "")), str(found.get("message", ""))

    @property
    def begun(self) -> bool:
        """Return whether the loop of the remembered epoch has begun."""
        return 0 < self.epoch == self.begun_epoch


def read(status: Any) -> Record:
    """Return what `status` remembers; anything unreadable is as if it were absent."""
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
        roles={str(r.get("name")): _role(r) for r in _maps(raw.get("roles"))},
        pod_failures={str(e.get("name")): _ends(e) for e in _maps(raw.get("ends"))},
        draining={str(d.get("pod")): to_seconds(d.get("since")) or 0.0 for d in _maps(raw.get("draining"))},
        begun_epoch=_count(raw.get("begunEpoch")),
        suspension=_suspension(raw.get("halt")) or _suspension_of_conditions(raw),
        conditions={str(c.get("type")): c for c in _maps(raw.get("conditions"))},
    )


def pod_failures_status(failures: Mapping[str, Ends]) -> list[dict[str, Any]]:
    """Return `status.ends`, by name."""
    return [
        {
            "name": name,
            **({"uid": one.uid} if one.uid else {}),
            **({"times": [to_text(at) for at in one.times]} if one.times else {}),
            **({"backoffSeconds": int(one.backoff)} if one.backoff else {}),
        }
        for name, one in sorted(failures.items())
    ]


def draining_status(draining: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return `status.draining`, by pod."""
    return [{"pod": pod, "since": to_text(since)} for pod, since in sorted(draining.items())]


def suspension_status(suspension: Suspension) -> dict[str, Any]:
    """Return `status.halt`."""
    return {
        "by": "rule" if suspension.rule else "user",
        **({"rule": suspension.rule} if suspension.rule else {}),
        **({"lastGoodStep": suspension.last_good_step} if suspension.last_good_step is not None else {}),
        "since": to_text(suspension.since),
        "done": suspension.done,
        **({"message": suspension.message} if suspension.message else {}),
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
    """Return what an operator that wrote no `halt` told by the condition Suspended: an upgrade must not resume a paused job."""
    if "halt" in raw or "begunEpoch" in raw or not raw.get("phase"):
        return None
    said = next((c for c in _maps(raw.get("conditions")) if c.get("type") == "Suspended"), {})
    if said.get("status") not in ("True", "Unknown"):
        return None
    return Suspension(
        rule="Paused" if said.get("reason") in ("Pausing", "Paused") else "",
        since=to_seconds(said.get("lastTransitionTime")) or 0.0,
        done=said["status"] == "True",
        message=str(said.get("message") or ""),
    )


def _role(value: Object) -> RoleRecord:
    return RoleRecord(
        active=_count(value.get("active")),
        failed=_count(value.get("failed")),
        restarts=_count(value.get("restarts")),
        restart_time=to_seconds(value.get("restartTime")),
    )


def _ends(value: Object) -> Ends:
    times = value.get("times")
    read_times = [to_seconds(at) for at in times] if isinstance(times, list) else []
    return Ends(
        uid=str(value.get("uid") or ""),
        times=tuple(at for at in read_times if at is not None),
        backoff=float(_count(value.get("backoffSeconds"))),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _maps(value: Any) -> list[Object]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
