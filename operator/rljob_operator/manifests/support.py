"""Everything a job needs besides its pods and its Secret."""

from __future__ import annotations

from typing import Any

from rl_core.api.defaults import Defaults, present
from rl_core.api.job import RLJob
from rljob_operator.manifests import claims, disruption, gang, network, service
from rljob_operator.manifests import config as config_maps
from rljob_operator.model import OperatorConfig


def build(job: RLJob, *, config: OperatorConfig, defaults: Defaults | None = None) -> list[dict[str, Any]]:
    """Return Service, ConfigMap, NetworkPolicies, a disruption budget, claim templates and gang objects, each with its manifest hash.

    `defaults`: those the job was resolved by; None = those of the code.
    """
    return [
        service.build(job, config=config),
        config_maps.build(job, defaults=defaults or present(), config=config),
        *network.build(job, config=config),
        disruption.budget(job, config=config),
        *claims.templates(job, config=config),
        *gang.manifests(job, config=config).objects,
    ]
