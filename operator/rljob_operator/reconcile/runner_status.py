"""The fields of a runner's `/status` that decisions use, in bounded size.

A runner may be a program of a tenant. One MiB of JSON with many small values takes more than 20 MiB as Python objects, and the operator keeps
the status of every running job. It therefore keeps a copy that has the known fields only and costs at most LARGEST bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl_core.plan.failure_rules import MISMATCH_METRICS
from rljob_operator.reconcile.report import LONGEST_PATH
from rljob_operator.reconcile.status import METRICS, SHARES

LARGEST = 1 << 20
"""Most bytes of a copy: VALUE for each value, and its text. 1,024 rollouts with one device each need about half of it."""
VALUE = 96
"""Bytes that are counted for a value besides its text: the object and its place in a list or a mapping, on average."""
WIDEST = 1024
"""Most bits of an integer. A wider one is not finite as a float, so no field could hold it."""
SCALAR = None


@dataclass(frozen=True, slots=True)
class _Each:
    """The form of a list whose values all have one form."""

    form: Any


class _Scalars:
    """The form of a mapping with any keys whose values are scalars."""


FORM: Mapping[str, Any] = {
    **dict.fromkeys(("epoch", "phase", "step", "totalSteps", "policyVersion", "reward", "appliedGeneration"), SCALAR),
    "checkpoint": dict.fromkeys(("lastStep", "bestStep", "resumedFrom", "path", "time", "bestReward"), SCALAR),
    "streaks": dict.fromkeys(("nonFiniteLoss", "rewardCollapse", "mismatch", "klBlowUp"), SCALAR),
    "metrics": dict.fromkeys((*METRICS, *MISMATCH_METRICS), SCALAR),
    "failure": {"type": SCALAR, "message": SCALAR},
    "stall": {"reason": SCALAR, "since": SCALAR, "waits": _Each({"who": SCALAR, "on": SCALAR, "what": SCALAR})},
    "roles": _Each({"name": SCALAR, "ready": SCALAR, "lag": SCALAR, "versions": _Scalars()}),
    "diverged": _Each(SCALAR),
    "workload": {
        **dict.fromkeys(("full", "seconds", "starvedInTraining", *SHARES.values()), SCALAR),
        "rollouts": _Each({"name": SCALAR, "busy": SCALAR}),
    },
    "missing": _Each({"role": SCALAR, "pod": SCALAR, "name": SCALAR}),
    "members": _Each({"pod": SCALAR, "state": SCALAR, "deviceUuids": _Each(SCALAR)}),
}
"""The fields of the runner's status that the operator uses, with the expected type of each. Fields at the end are dropped first when the
status is too large, so the longest lists are last."""


class _Full(Exception):
    """The copy has reached LARGEST."""


def kept(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a `/status` document with the fields of FORM, without values of another form. What exceeds LARGEST is left out."""
    return _Copy().mapping(status, FORM)


class _Copy:
    """Copies one status and counts its bytes."""

    def __init__(self) -> None:
        self._budget = LARGEST

    def mapping(self, value: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `form` that `value` has; those that come after LARGEST are left out."""
        copied: dict[str, Any] = {}
        with suppress(_Full):
            for name, part in form.items():
                if name in value:
                    copied[name] = self._value(value[name], part)
        return copied

    def _value(self, value: Any, form: Any) -> Any:
        """Return the copy of a value; None if it has another form."""
        self._count(value)
        if isinstance(form, _Each):
            return self._list(value, form.form) if isinstance(value, list) else None
        if isinstance(form, _Scalars):
            return self._scalars(value) if isinstance(value, Mapping) else None
        if form is not SCALAR:
            return self.mapping(value, form) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            return value[:LONGEST_PATH]
        if isinstance(value, int):
            return value if value.bit_length() <= WIDEST else None
        return value if isinstance(value, float) else None

    def _list(self, values: list[Any], form: Any) -> list[Any]:
        copied: list[Any] = []
        with suppress(_Full):
            for value in values:
                copied.append(self._value(value, form))
        return copied

    def _scalars(self, values: Mapping[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        with suppress(_Full):
            for name, value in values.items():
                self._count(name)
                copied[name[:LONGEST_PATH]] = self._value(value, SCALAR)
        return copied

    def _count(self, value: Any) -> None:
        self._budget -= VALUE + (len(value[:LONGEST_PATH]) if isinstance(value, str) else 0)
        if self._budget < 0:
            raise _Full
