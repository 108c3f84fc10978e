"""The status of the runner: its `/status`, or the termination message of actor-0. Invalid fields are ignored: versions may differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import ContainerEnd, Object, PodView, Progress

MOST = 2**53 - 1
"""Largest integer in a status, which all JSON parsers represent exactly."""
LONGEST_PATH, LONGEST_NAME = 4096, 256
NOT_BEGUN = frozenset({"", "Starting"})
"""Phases of a runner that has not begun: its step is not yet the checkpoint's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The status of the runner in one epoch."""

    raw: Object
    epoch: int
    phase: str
    at: float
    """When it was received, seconds since 1970."""
    applied_generation: int | None = None
    members: tuple[Object, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    """(role, pod) of members it waits for."""
    stall: Object | None = None

    @property
    def begun(self) -> bool:
        """Whether the training loop runs. Before that, step and version of the status are not those of the resumed run."""
        return self.phase not in NOT_BEGUN

    def count(self, name: str) -> int | None:
        """Return an integer field of the status; None when it is absent."""
        return whole_number(self.raw.get(name))

    def number(self, name: str) -> float | None:
        """Return a finite number of the status; None when it is absent."""
        return finite(self.raw.get(name))

    def mapping(self, name: str) -> Object:
        """Return a mapping of the status; empty when it is absent."""
        value = self.raw.get(name)
        return value if isinstance(value, Mapping) else {}

    def state_of(self, pod: str) -> str | None:
        """Return the state of the pod's processes, `drained` only when all of them are; None when the runner does not know the pod."""
        states = [str(member.get("state")) for member in self.members if member.get("pod") == pod]
        return next((state for state in states if state != "drained"), states[0]) if states else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminationMessage:
    """The supervisor's termination message."""

    reason: str = ""
    tail: str = ""
    """Last log lines."""
    summary: Object = field(default_factory=dict)
    """The runner's last status; empty except on actor-0."""


def from_progress(progress: Progress | None, pod: PodView | None, *, epoch: int) -> Report | None:
    """Return the report of `pod`, the actor-0 of `epoch`; None when the status is from another pod or another epoch."""
    if progress is None or pod is None or progress.pod_uid != pod.uid or not isinstance(progress.status, Mapping):
        return None
    report = read(progress.status, at=progress.at)
    return report if report.epoch == epoch else None


def from_end(pod: PodView | None, *, epoch: int, at: float) -> Report | None:
    """Return the last report of an ended actor-0 of `epoch`; None when it left none."""
    for end in pod.ended if pod is not None else ():
        summary = termination_message(end).summary
        if summary:
            report = read({"epoch": epoch, **summary}, at=at)
            return report if report.epoch == epoch else None
    return None


def read(status: Object, *, at: float) -> Report:
    """Return the report of a `/status` document, without invalid fields."""
    epoch, applied, stall, phase = (status.get(name) for name in ("epoch", "appliedGeneration", "stall", "phase"))
    return Report(
        raw=status,
        epoch=epoch if isinstance(epoch, int) else -1,
        phase=phase if isinstance(phase, str) else "",
        at=at,
        applied_generation=whole_number(applied),
        members=tuple(member for member in _list(status.get("members")) if isinstance(member, Mapping)),
        missing=tuple(_waited(member) for member in _list(status.get("missing")) if isinstance(member, Mapping)),
        stall=stall if isinstance(stall, Mapping) else None,
    )


def termination_message(end: ContainerEnd) -> TerminationMessage:
    """Return the termination message of a container: the supervisor's JSON, or plain text as the tail."""
    try:
        value = json.loads(end.message)
    except (ValueError, RecursionError):
        return TerminationMessage(tail=end.message)
    if not isinstance(value, Mapping):
        return TerminationMessage(tail=end.message)
    tail, summary = value.get("tail"), value.get("summary")
    text = "\n".join(map(str, tail)) if isinstance(tail, list) else str(tail or "")
    return TerminationMessage(
        reason=str(value.get("reason") or ""), tail=text, summary=summary if isinstance(summary, Mapping) else {}
    )


def whole_number(value: Any) -> int | None:
    """Return `value` when it is an integer between 0 and MOST, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def finite(value: Any) -> float | None:
    """Return `value` as a float when it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _waited(missing: Object) -> tuple[str, str]:
    return str(missing.get("role") or ""), str(missing.get("pod") or missing.get("name") or "?")
