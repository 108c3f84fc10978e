"""Accelerators: the device plugin's resource, or claims of resource.k8s.io/v1 against a DeviceClass (DRA).

An exclusive claim comes from a ResourceClaimTemplate per role and goes with its pod. A template's spec cannot change, so its name
carries a hash of it: with another deviceClass or number of gpus the role gets another template, for its next pods. Containers of one
pod share its claim.
"""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.roles import RoleSpec
from rl_core.plan.launch import PodPlan
from rl_core.plan.slots import own_pods
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "resource.k8s.io/v1"
NAME = "gpus"
"""Name of the claim inside a pod, and of the request inside the claim."""


def by_device_plugin(spec: RoleSpec, pod: PodPlan) -> bool:
    """Return whether a container asks for accelerators as a resource of the device plugin.

    Raises ValueError for containers that would share them so: each would get its own.
    """
    asked = bool(spec.gpus) and spec.gpu_allocation == "devicePlugin"
    if asked and pod.claim is not None and pod.claim.shared and len(pod.containers) > 1:
        raise ValueError(
            f"pod {pod.name} must share its accelerators by gpuAllocation dra, got devicePlugin; use dra, or one container for both"
        )
    return asked


def templates(job: RLJob, *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the ResourceClaimTemplates of the roles whose accelerators are claims."""
    specs: dict[str, RoleSpec] = {"actor": job.spec.actor, "rollout": job.spec.rollout, "env": job.spec.env}
    return [
        meta.support(
            job,
            "ResourceClaimTemplate",
            _template_name(job, role, spec),
            {"spec": {"spec": _request(spec)}},
            api_version=API_VERSION,
            component=role,
            config=config,
        )
        for role, spec in specs.items()
        if spec.gpus and spec.gpu_allocation == "dra" and own_pods(job.spec, role)
    ]


def of_pod(job: RLJob, pod: PodPlan) -> list[dict[str, Any]]:
    """Return `spec.resourceClaims` of a pod: its accelerators, and the claims the user named."""
    specs = {"actor": job.spec.actor, "rollout": job.spec.rollout, "env": job.spec.env}
    roles: list[RoleSpec] = [specs[container.image_role] for container in pod.containers]
    found: dict[str, dict[str, Any]] = {}
    if pod.claim is not None and roles[0].gpu_allocation == "dra":
        template = _template_name(job, pod.role, specs[pod.role])
        found[NAME] = {"name": NAME, "resourceClaimTemplateName": template}
    for role in roles:
        for claim in role.resource_claims:
            found[claim.name] = {key: value for key, value in meta.api(claim).items() if key != "request"}
    return list(found.values())


def references(spec: RoleSpec, pod: PodPlan) -> list[dict[str, str]]:
    """Return `resources.claims` of a container."""
    own = [{"name": NAME}] if pod.claim is not None and spec.gpu_allocation == "dra" else []
    users = [
        {"name": claim.name, **({"request": claim.request} if claim.request is not None else {})}
        for claim in spec.resource_claims
    ]
    return own + users


def _template_name(job: RLJob, role: str, spec: RoleSpec) -> str:
    name, _, uid = meta.identity(job)
    return naming.claim_template(name, role, meta.digest([uid, _request(spec)])[:8])


def _request(spec: RoleSpec) -> dict[str, Any]:
    exactly = {"deviceClassName": spec.device_class, "allocationMode": "ExactCount", "count": spec.gpus}
    return {"devices": {"requests": [{"name": NAME, "exactly": exactly}]}}
