"""Everything a job needs besides its pods and its Secret."""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rljob_operator.manifests import claims, gang, network, service
from rljob_operator.manifests import config as config_maps
from rljob_operator.model import OperatorConfig


def build(job: RLJob, *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return Service, ConfigMap, NetworkPolicies, claim templates and gang objects, each with its manifest hash."""
    return [
        service.build(job, config=config),
        config_maps.build(job, config=config),
        *network.build(job, config=config),
        *claims.templates(job, config=config),
        *gang.manifests(job, config=config).objects,
    ]
