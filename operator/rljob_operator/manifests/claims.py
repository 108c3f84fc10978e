"""Accelerators of a pod: the resource of a device plugin, or claims of resource.k8s.io/v1 for a DeviceClass (DRA).

A claim is created from the ResourceClaimTemplate of its role and deleted with its pod. The spec of a template cannot change, so its name
contains a hash of it: with another deviceClass or number of gpus, the next pods of the role use another template. The containers of one pod
share its claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.roles import RoleSpec
from rl_core.plan.groups import Group, groups_of
from rl_core.plan.launch import PodPlan
from rl_core.plan.slots import own_pods
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "resource.k8s.io/v1"
NAME = "gpus"
"""Name of the claim inside a pod, and of the request inside the claim."""


def by_device_plugin(spec: RoleSpec, pod: PodPlan) -> bool:
    """Return whether a container requests accelerators as a resource of the device plugin.

    Raises ValueError for containers that are to share accelerators, because the device plugin would give each of them its own.
    """
    requested = bool(spec.gpus) and spec.gpu_allocation == "devicePlugin"
    if requested and pod.claim is not None and pod.claim.shared and len(pod.containers) > 1:
        raise ValueError(
            f"pod {pod.name} must share its accelerators by gpuAllocation dra, got devicePlugin; use dra, or one container for both groups"
        )
    return requested


def templates(job: RLJob, *, config: OperatorConfig, groups: Mapping[str, Group] | None = None) -> list[dict[str, Any]]:
    """Return the ResourceClaimTemplates of the groups that get their accelerators by claims."""
    groups = groups_of(job.spec) if groups is None else groups
    return [
        meta.support(
            job,
            "ResourceClaimTemplate",
            _template_name(job, group),
            {"spec": {"spec": _request(group.spec)}},
            api_version=API_VERSION,
            component=group.name,
            config=config,
        )
        for group in groups.values()
        if group.spec.gpus and group.spec.gpu_allocation == "dra" and own_pods(job.spec, group.name, groups)
    ]


def of_pod(job: RLJob, pod: PodPlan, groups: Mapping[str, Group]) -> list[dict[str, Any]]:
    """Return `spec.resourceClaims` of a pod: its accelerators, and the claims the user named."""
    specs: list[RoleSpec] = [groups[container.image_role].spec for container in pod.containers]
    claims: dict[str, dict[str, Any]] = {}
    if pod.claim is not None and specs[0].gpu_allocation == "dra":
        template = _template_name(job, groups[pod.role])
        claims[NAME] = {"name": NAME, "resourceClaimTemplateName": template}
    for spec in specs:
        for claim in spec.resource_claims:
            claims[claim.name] = {key: value for key, value in meta.api(claim).items() if key != "request"}
    return list(claims.values())


def references(spec: RoleSpec, pod: PodPlan) -> list[dict[str, str]]:
    """Return `resources.claims` of a container."""
    own_reference = [{"name": NAME}] if pod.claim is not None and spec.gpu_allocation == "dra" else []
    users = [
        {"name": claim.name, **({"request": claim.request} if claim.request is not None else {})}
        for claim in spec.resource_claims
    ]
    return own_reference + users


def _template_name(job: RLJob, group: Group) -> str:
    name, _, uid = meta.identity(job)
    return naming.claim_template(name, group.name, meta.digest([uid, _request(group.spec)])[:8])


def _request(spec: RoleSpec) -> dict[str, Any]:
    exactly = {"deviceClassName": spec.device_class, "allocationMode": "ExactCount", "count": spec.gpus}
    return {"devices": {"requests": [{"name": NAME, "exactly": exactly}]}}
