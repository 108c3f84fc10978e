"""NetworkPolicies of a job (protocol.md 6), and a pure judge of what policies allow."""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rljob_operator.model import OperatorConfig


def build(job: RLJob, *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the NetworkPolicies."""
    return []
