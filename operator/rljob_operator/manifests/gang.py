"""Pods that are scheduled together or not at all. One interface for every scheduler: objects to apply, and fields of the pods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl_core.api.job import RLJob
from rljob_operator.model import OperatorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """What a scheduler needs to know about a job's gangs."""

    objects: tuple[dict[str, Any], ...] = ()
    """For server-side apply."""
    pod_fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By role: fields to be merged into the pod."""


def manifests(job: RLJob, *, config: OperatorConfig) -> Gang:
    """Return the gang objects of a job and the fields of its pods; empty where the cluster serves no API for it."""
    return Gang()
