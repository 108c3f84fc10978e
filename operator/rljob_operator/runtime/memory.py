"""What the operator keeps in mind about a job between two reconciles, and can lose without harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import Progress
from rljob_operator.reconcile.parsing import ParsedJob

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between tries of a request that was refused or changed nothing; doubling."""


@dataclass(slots=True)
class BackOff:
    """When something that did not help may be tried again."""

    tries: int = 0
    next_try: float = 0.0
    """Seconds since 1970."""

    def failed(self, now: float) -> float:
        """Count a try that did not help; return the seconds until the next."""
        pause = min(FIRST_PAUSE * 2.0 ** min(self.tries, 20), LONGEST_PAUSE)
        self.tries, self.next_try = self.tries + 1, now + pause
        return pause

    def left(self, now: float) -> float:
        """Return the seconds until the next try; 0 when its time has come."""
        return max(self.next_try - now, 0.0)


@dataclass(slots=True)
class Refusal:
    """A create or an apply that was refused and has not succeeded since."""

    words: str
    """The API server's."""
    manifest: str = ""
    """Manifest hash of what was refused; empty for a pod or a Secret, whose presence alone settles it."""
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(slots=True)
class JobMemory:
    """One job's memory; made anew when a job of the same name has another uid."""

    uid: str
    parsed: ParsedJob = field(default_factory=ParsedJob)
    """The job's spec as the last look understood it."""
    progress: Progress | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """By `Kind/name`."""
    refused_change: tuple[int, str] | None = None
    """(generation, the runner's words) of a changed spec that the runner refused."""
    delete_backoff: dict[str, BackOff] = field(default_factory=dict)
    """By uid: deletions that were accepted and changed nothing, as a finalizer holds the object."""
    scaling: BackOff = field(default_factory=BackOff)
    """Writes of spec.rollout.replicas that were refused."""
    name_conflicts: set[str] = field(default_factory=set)
    """`Kind/name` of names held by others."""
    progress_written: float = 0.0
    """When a progress-only status was last written, seconds since 1970."""
    secret_due: float | None = None
    """When the Secret's presence is to be asserted again though no pod is created; None = not decided yet."""
    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The volume claims last read, by name."""
    claims_due: float = 0.0
    """When they are to be read again."""

    def refuse(self, label: str, words: str, *, now: float, manifest: str = "") -> bool:
        """Note that an object was refused, and set the time of its next try; return whether it is the first refusal of this object."""
        known = self.refusals.get(label)
        news = known is None or known.manifest != manifest
        refusal = Refusal(words, manifest) if known is None or news else known
        refusal.words = words
        refusal.back_off.failed(now)
        self.refusals[label] = refusal
        return news

    def pause(self, label: str, *, now: float, manifest: str = "") -> float:
        """Return the seconds until a refused object may be tried again; 0 when it may, or when another one is wanted by now."""
        refusal = self.refusals.get(label)
        return refusal.back_off.left(now) if refusal is not None and refusal.manifest == manifest else 0.0

    def forget_refused_applies(self, wanted: Mapping[str, str]) -> bool:
        """Forget refused applies that are not `wanted` (label -> manifest hash) any more; return whether there were any."""
        settled = [
            label
            for label, refusal in self.refusals.items()
            if refusal.manifest and wanted.get(label) != refusal.manifest
        ]
        for label in settled:
            del self.refusals[label]
        return bool(settled)

    def deletion_is_due(self, uid: str, *, now: float) -> bool:
        """Return whether a deletion may be tried: it has not been in vain, or its pause is over."""
        back_off = self.delete_backoff.get(uid)
        return back_off is None or back_off.left(now) == 0

    def clear(self, label: str) -> None:
        """Forget what stood in the way of a name."""
        self.refusals.pop(label, None)
        self.name_conflicts.discard(label)
