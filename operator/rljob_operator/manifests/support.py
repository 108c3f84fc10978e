"""Everything a job needs besides its pods and its Secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.api.defaults import Defaults, present
from rl_core.api.job import RLJob
from rl_core.plan.groups import Group, groups_of
from rljob_operator.manifests import claims, disruption, gang, network, service
from rljob_operator.manifests import config as config_maps
from rljob_operator.model import OperatorConfig


def build(
    job: RLJob,
    *,
    config: OperatorConfig,
    defaults: Defaults | None = None,
    groups: Mapping[str, Group] | None = None,
) -> list[dict[str, Any]]:
    """Return Service, ConfigMap, NetworkPolicies, disruption budgets, claim templates and gang objects, each with its manifest hash.

    `defaults` are the defaults by which the job was resolved (None: those of this version), `groups` its groups (None: those of the spec).
    """
    groups = groups_of(job.spec) if groups is None else groups
    return [
        service.build(job, config=config),
        config_maps.build(job, defaults=defaults or present(), config=config),
        *network.build(job, config=config, groups=groups),
        *disruption.budgets(job, config=config, groups=groups),
        *claims.templates(job, config=config, groups=groups),
        *gang.manifests(job, config=config, groups=groups).objects,
    ]
