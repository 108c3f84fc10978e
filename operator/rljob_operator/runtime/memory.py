"""What the operator keeps in mind about a job between two reconciles, and can lose without harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import Progress
from rljob_operator.reconcile.parsing import ParsedJob

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between tries of a create the API server refused; doubling."""


@dataclass(slots=True)
class Refusal:
    """A create that was refused and has not succeeded since."""

    words: str
    """The API server's."""
    tries: int
    next_try: float
    """Seconds since 1970."""


@dataclass(slots=True)
class JobMemory:
    """One job's memory; made anew when a job of the same name has another uid."""

    uid: str
    parsed: ParsedJob = field(default_factory=ParsedJob)
    """The job's spec as the last look understood it."""
    progress: Progress | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """By `Kind/name`."""
    foreign: set[str] = field(default_factory=set)
    """`Kind/name` of names held by others."""
    progress_written: float = 0.0
    """When a progress-only status was last written, seconds since 1970."""
    secret_due: float | None = None
    """When the Secret's presence is to be asserted again though no pod is created; None = not decided yet."""
    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The volume claims last read, by name."""
    claims_due: float = 0.0
    """When they are to be read again."""

    def refuse(self, label: str, words: str, *, now: float) -> bool:
        """Note that a create was refused, and set the time of its next try; return whether it is the first refusal."""
        known = self.refusals.get(label)
        tries = known.tries + 1 if known is not None else 1
        pause = min(FIRST_PAUSE * 2.0 ** min(tries - 1, 20), LONGEST_PAUSE)
        self.refusals[label] = Refusal(words, tries, now + pause)
        return known is None

    def pause(self, label: str, *, now: float) -> float:
        """Return the seconds until a refused create may be tried again; 0 when it may."""
        refusal = self.refusals.get(label)
        return max(refusal.next_try - now, 0.0) if refusal is not None else 0.0

    def clear(self, label: str) -> None:
        """Forget what stood in the way of a name."""
        self.refusals.pop(label, None)
        self.foreign.discard(label)
