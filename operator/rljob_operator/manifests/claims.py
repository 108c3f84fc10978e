"""Accelerators: the device plugin's resource, or claims of resource.k8s.io/v1 against a DeviceClass (DRA).

An exclusive claim comes from a ResourceClaimTemplate per role and goes with its pod. Containers of one pod share its claim; two
colocated pods share a named one.
"""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.roles import RoleSpec
from rl_core.plan.launch import PodPlan
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "resource.k8s.io/v1"
NAME = "gpus"
"""Name of the claim inside a pod, and of the request inside the claim."""
ROLES = ("actor", "rollout", "env")


def by_device_plugin(spec: RoleSpec, pod: PodPlan) -> bool:
    """Return whether the pod's accelerators are a resource of the device plugin."""
    return spec.gpu_allocation == "devicePlugin"


def templates(job: RLJob, *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the ResourceClaimTemplates of the roles whose accelerators are claims."""
    name, _, _ = meta.identity(job)
    specs: dict[str, RoleSpec] = {"actor": job.spec.actor, "rollout": job.spec.rollout, "env": job.spec.env}
    return [
        meta.support(
            job,
            "ResourceClaimTemplate",
            naming.claim_template(name, role),
            {"spec": {"spec": _request(spec)}},
            api_version=API_VERSION,
            component=role,
            config=config,
        )
        for role, spec in specs.items()
        if spec.gpus and spec.gpu_allocation == "dra"
    ]


def of_pod(job: RLJob, pod: PodPlan) -> list[dict[str, Any]]:
    """Return `spec.resourceClaims` of a pod: its accelerators, and the claims the user named."""
    name, _, _ = meta.identity(job)
    specs = {"actor": job.spec.actor, "rollout": job.spec.rollout, "env": job.spec.env}
    roles: list[RoleSpec] = [specs[container.image_role] for container in pod.containers]
    found: dict[str, dict[str, Any]] = {}
    if pod.claim is not None and roles[0].gpu_allocation == "dra":
        source = (
            {"resourceClaimName": pod.claim.name}
            if pod.claim.name is not None
            else {"resourceClaimTemplateName": naming.claim_template(name, pod.role)}
        )
        found[NAME] = {"name": NAME, **source}
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


def _request(spec: RoleSpec) -> dict[str, Any]:
    exactly = {"deviceClassName": spec.device_class, "allocationMode": "ExactCount", "count": spec.gpus}
    return {"devices": {"requests": [{"name": NAME, "exactly": exactly}]}}
