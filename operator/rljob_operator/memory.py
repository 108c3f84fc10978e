"""What the operator keeps in mind about a job between two reconciles, and can lose without harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import Progress, Refusal


@dataclass(slots=True)
class JobMemory:
    """One job's memory; made anew when a job of the same name has another uid."""

    uid: str
    progress: Progress | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Creates the API server refused, by `Kind/name`; `reconcile` decides when they are tried again."""
    foreign: set[str] = field(default_factory=set)
    """`Kind/name` of names held by others."""
    progress_written: float = 0.0
    """When a progress-only status was last written, seconds since 1970."""
    secret_due: float = 0.0
    """When the Secret's presence is to be asserted again though no pod is created."""
    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The volume claims last read, by name."""
    claims_due: float = 0.0
    """When they are to be read again."""

    def refuse(self, label: str, words: str, *, now: float) -> bool:
        """Note that a create was refused; return whether the words are news."""
        known = self.refusals.get(label)
        self.refusals[label] = Refusal(message=words, at=now)
        return known is None or known.message != words

    def clear(self, label: str) -> None:
        """Forget what stood in the way of a name."""
        self.refusals.pop(label, None)
        self.foreign.discard(label)
