"""The state that the operator keeps in memory about a job between two reconciles. Losing it does no harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.kinds import Kind
from rljob_operator.model import ControlCall, Object, Progress
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.runtime.backoff import Backoff

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between attempts of a request that was refused or had no effect."""
LONGEST_STATUS_PAUSE = 300.0
"""The same for a refused status. Each attempt is an event, and must leave the other events of the job their share of its budget."""
FREE_APPLIES = 3
"""Applies of one manifest that are followed by no pause, so that an object that somebody edits or deletes is there again at once."""
SETTLED_SECONDS = 600.0
"""Seconds after which the applies of an object are counted anew."""


def request_backoff() -> Backoff:
    """Return the back-off of a request that was refused or had no effect."""
    return Backoff(first=FIRST_PAUSE, longest=LONGEST_PAUSE)


def status_backoff() -> Backoff:
    """Return a new back-off for writes of the status: 1 s after the first refusal, doubled up to 300 s."""
    return Backoff(first=FIRST_PAUSE, longest=LONGEST_STATUS_PAUSE)


@dataclass(slots=True)
class Refusal:
    """A create or an apply that the API server refused and that has not succeeded since."""

    message: str
    """The message of the API server."""
    manifest: str = ""
    """Manifest hash of the refused object. Empty for a pod or a Secret, for which it is enough that the object exists."""
    backoff: Backoff = field(default_factory=request_backoff)


@dataclass(slots=True)
class Applies:
    """The applies of one supporting object with one manifest. Another client that changes the object back makes them repeat."""

    manifest: str
    at: float = 0.0
    """Time of the newest one, seconds since 1970."""
    backoff: Backoff = field(
        default_factory=lambda: Backoff(first=FIRST_PAUSE, longest=LONGEST_PAUSE, free_attempts=FREE_APPLIES)
    )


@dataclass(slots=True)
class JobMemory:
    """The state of one job. A job of the same name with another uid gets a new one."""

    uid: str
    parsed: ParsedJob = field(default_factory=ParsedJob)
    """The spec of the job as the last reconcile parsed it."""
    progress: Progress | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Refused objects by `Kind/name`."""
    applies: dict[str, Applies] = field(default_factory=dict)
    """Supporting objects that were applied, by `Kind/name`."""
    refused_change: tuple[int, str] | None = None
    """(generation, message of the runner) of a changed spec that the runner refused."""
    delete_backoff: dict[str, Backoff] = field(default_factory=dict)
    """By uid: deletions that were accepted and had no effect, because a finalizer holds the object."""
    scaling: Backoff = field(default_factory=request_backoff)
    """Refused writes of spec.rollout.replicas."""
    name_conflicts: dict[str, Kind] = field(default_factory=dict)
    """`Kind/name` of names that are taken by objects of somebody else, and the kind by which such an object is read."""
    refused_status: Object | None = None
    """The newest status, while the API server refuses to store it; None when it is stored."""
    status_backoff: Backoff = field(default_factory=status_backoff)
    """Refused writes of the status."""
    progress_written: float = 0.0
    """Time of the last progress-only status write, seconds since 1970."""
    secret_due: float | None = None
    """Time of the next check that the Secret exists, for a job that creates no pod; None = not scheduled yet."""
    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The volume claims last read, by name."""
    claims_due: float = 0.0
    """Time of the next read of the volume claims."""

    def with_newest_status(self, job: Object) -> Object:
        """Return the job with the status that the API server has refused to store so far, or `job` itself if there is none.

        The next decision is made from it, so that counters and times continue, and a suspension or a deadline takes effect. It is lost when
        this process ends; another one decides from the status that was stored last.
        """
        return job if self.refused_status is None else {**job, "status": self.refused_status}

    def record_refused_status(self, status: Object, *, now: float) -> float:
        """Record that the API server refused a status; return the pause in seconds before the next attempt."""
        self.refused_status = status
        return self.status_backoff.step(now)

    def record_written_status(self) -> None:
        """Record that the newest status is stored."""
        self.refused_status, self.status_backoff = None, status_backoff()

    def record_refusal(self, label: str, message: str, *, now: float, manifest: str = "") -> bool:
        """Record that an object was refused and schedule the next attempt. Return whether it is the first refusal of this object."""
        earlier = self.refusals.get(label)
        is_new = earlier is None or earlier.manifest != manifest
        refusal = Refusal(message, manifest) if earlier is None or is_new else earlier
        refusal.message = message
        refusal.backoff.step(now)
        self.refusals[label] = refusal
        return is_new

    def apply_pause(self, label: str, manifest: str, *, now: float) -> float:
        """Return the seconds until an object may be applied once more with a manifest that did not last."""
        applies = self.applies.get(label)
        return applies.backoff.remaining(now) if applies is not None and applies.manifest == manifest else 0.0

    def record_apply(self, label: str, manifest: str, *, now: float) -> bool:
        """Record that an object was applied. Return whether it was applied with this manifest before and did not keep it."""
        applies = self.applies.get(label)
        if applies is None or applies.manifest != manifest or now - applies.at > SETTLED_SECONDS:
            applies = self.applies[label] = Applies(manifest)
        applies.at = now
        return applies.backoff.step(now) > 0

    def refusal_pause(self, label: str, *, now: float, manifest: str = "") -> float:
        """Return the seconds until a refused object may be sent again.

        The result is 0 when the next attempt is due, and when the wanted manifest is no longer the refused one.
        """
        refusal = self.refusals.get(label)
        return refusal.backoff.remaining(now) if refusal is not None and refusal.manifest == manifest else 0.0

    def forget_refused_applies(self, wanted: Mapping[str, str]) -> bool:
        """Forget refused applies that are not `wanted` (label -> manifest hash) any more. Return whether there were any."""
        settled = [
            label
            for label, refusal in self.refusals.items()
            if refusal.manifest and wanted.get(label) != refusal.manifest
        ]
        for label in settled:
            del self.refusals[label]
        return bool(settled)

    def record_answer(self, call: ControlCall, message: str) -> bool:
        """Record whether the runner refused a changed spec; `message` is empty if it did not. Return whether the record has changed.

        The first message about a generation is kept, so a runner whose messages vary does not cause a status write each time.
        """
        if call.method != "PUT /control":
            return False
        previous, generation = self.refused_change, call.body["generation"]
        if message and previous is not None and previous[0] == generation:
            return False
        self.refused_change = (generation, message) if message else None
        return self.refused_change != previous

    def deletion_is_due(self, uid: str, *, now: float) -> bool:
        """Return whether the object may be deleted now: no earlier deletion was without effect, or its pause is over."""
        backoff = self.delete_backoff.get(uid)
        return backoff is None or backoff.remaining(now) == 0

    def clear(self, label: str) -> None:
        """Forget the refusal and the name conflict of an object."""
        self.refusals.pop(label, None)
        self.name_conflicts.pop(label, None)
