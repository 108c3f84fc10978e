"""The containers of a pod: one supervisor each, whose environment says which processes to run, and the user's init containers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.pods import InitContainer, Resources
from rl_core.api.roles import RoleSpec
from rl_core.api.variables import EnvValueFrom
from rl_core.plan.colocated import shape_of
from rl_core.plan.groups import BUILT_IN, CONTROL_GROUP, Group
from rl_core.plan.launch import ContainerPlan, PodPlan, ProcessPlan
from rl_core.plan.slots import own_pods
from rljob_operator.manifests import claims, meta, volumes
from rljob_operator.model import OperatorConfig

COMMAND = ["python", "-m", "rl_core.launch.pod"]
"""Finds its PodPlan in the environment variable RLJOB_POD_PLAN."""
USER = 1000
TERMINATION_LOG = "/dev/termination-log"
DEFAULT_RESUME = "auto"
GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")
"""Names that NVIDIA's device plugin gives to GPUs and their parts. Other resources of this vendor are network cards."""
NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Environment of containers that request no device. NVIDIA's runtime gives a container the devices that this variable names, and an
image or a ConfigMap of envFrom may name all devices of the node; `env` overrides both. A container that requests GPUs of the device
plugin must not have it, because it would also override the value of the plugin. The devices of a claim come by CDI, whatever the variable
says.
"""


class ImageMissing(ValueError):
    """Neither the job nor the operator names an image for a group."""


def image_of(group: Group, *, config: OperatorConfig) -> str | None:
    """Return the image of a group: that of the job, else the default of the operator; None when neither names one.

    The default of a group that the job declares is that of the control group, which has torch and this package.
    """
    default = group.name if group.name in BUILT_IN else CONTROL_GROUP
    return group.spec.image or config.images.get(default)


def groups_with_containers(job: RLJob, groups: Mapping[str, Group]) -> list[Group]:
    """Return the groups that have containers of their own, in contrast to those whose processes all run in containers of another one."""
    return [
        group
        for group in groups.values()
        if own_pods(job.spec, group.name, groups) or shape_of(job.spec) == "containers"
    ]


def main(job: RLJob, pod: PodPlan, container: ContainerPlan, *, config: OperatorConfig, group: Group) -> dict[str, Any]:
    """Return the container of one supervisor, which runs processes of `group`. Raises ImageMissing."""
    spec = group.spec
    port = int(container.processes[0].env["RLJOB_HEALTH_PORT"])
    return {
        **_base(group, container.name, spec.image, config=config),
        "command": COMMAND,
        "env": [
            *_variables({**_user_env(job, spec.env), **_environment(job, pod, container, spec), **_devices(spec, pod)}),
            *_sourced(spec.env_value_from),
            _POD_IP,
        ],
        **({"envFrom": [meta.api(source) for source in spec.env_from]} if spec.env_from else {}),
        "ports": [
            {"name": name, "containerPort": number, "protocol": "TCP"}
            for name, number in _ports(container, port, first=container is pod.containers[0]).items()
        ],
        "resources": _resources(spec, pod),
        "securityContext": security_context(spec, add=spec.security_context.capabilities.add),
        "volumeMounts": volumes.mounts(job, group.name, spec.volume_mounts),
        **_probes(port),
    }


def init(job: RLJob, group: Group, container: InitContainer, *, config: OperatorConfig) -> dict[str, Any]:
    """Return one of the user's init containers, with the same user and security context as the main container. Raises ImageMissing."""
    return {
        **_base(group, container.name, container.image, config=config),
        **({"command": container.command} if container.command else {}),
        **({"args": container.args} if container.args else {}),
        **({"restartPolicy": container.restart_policy} if container.restart_policy is not None else {}),
        "env": [
            *_variables({**_user_env(job, container.env), **({} if _has_devices(container.resources) else NO_DEVICES)}),
            *_sourced(container.env_value_from),
        ],
        **({"resources": resources} if (resources := meta.api(container.resources)) else {}),
        "volumeMounts": volumes.init_mounts(job, container.volume_mounts),
    }


def security_context(spec: RoleSpec, *, add: Sequence[str] = ()) -> dict[str, Any]:
    """Return the security context of a container: PodSecurity `restricted`, a read-only root, and the capabilities `add`."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **({"add": list(add)} if add else {})},
        "privileged": False,
        "readOnlyRootFilesystem": spec.security_context.read_only_root_filesystem,
        "runAsNonRoot": True,
        "seccompProfile": {"type": spec.security_context.seccomp_profile.type},
    }


def _base(group: Group, name: str, image: str | None, *, config: OperatorConfig) -> dict[str, Any]:
    spec = group.spec
    image_name = image or image_of(group, config=config)
    if image_name is None:
        raise ImageMissing(
            f"{group.name}.image must name an image, got none; set it, or the chart value images.{group.name} for all jobs"
        )
    policy = spec.image_pull_policy or config.image_pull_policy
    return {
        "name": name,
        "image": image_name,
        **({"imagePullPolicy": policy} if policy else {}),
        "securityContext": security_context(spec),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _user_env(job: RLJob, env: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables, with a writable HOME and with the user's modules in PYTHONPATH."""
    variables = {"HOME": volumes.TMP, **env}
    if job.spec.code is not None:
        variables["PYTHONPATH"] = ":".join(filter(None, (volumes.CODE, env.get("PYTHONPATH"))))
    return variables


def _sourced(values: Sequence[EnvValueFrom]) -> list[dict[str, Any]]:
    """Return the environment entries of a container whose values come from ConfigMaps, Secrets or fields."""
    sources = map(meta.api, values)
    return [{"name": value.pop("name"), "valueFrom": value} for value in sources]


def _devices(spec: RoleSpec, pod: PodPlan) -> dict[str, str]:
    """Return the variable that hides NVIDIA devices from a container; empty if the container requests some."""
    plugged = claims.by_device_plugin(spec, pod) and GPU_RESOURCE.fullmatch(spec.gpu_resource) is not None
    return {} if plugged or _has_devices(spec.resources) else NO_DEVICES


def _has_devices(resources: Resources) -> bool:
    """Return whether a container requests GPUs of the device plugin, in a quantity that is not 0."""
    quantities = (*resources.requests.items(), *resources.limits.items())
    return any(GPU_RESOURCE.fullmatch(name) and re.search("[1-9]", str(quantity)) for name, quantity in quantities)


def _environment(job: RLJob, pod: PodPlan, container: ContainerPlan, spec: RoleSpec) -> dict[str, str]:
    env = {
        "RLJOB_POD_PLAN": _plan(pod, container, spec.env).to_json(),
        "RLJOB_GRACE_SECONDS": str(spec.termination_grace_period_seconds),
        "RLJOB_TERMINATION_LOG": TERMINATION_LOG,
        "RLJOB_HEALTH_HOST": "0.0.0.0",
    }
    if container.image_role == CONTROL_GROUP:
        env |= {"RLJOB_OUTPUT": volumes.output(job), "RLJOB_RESUME": DEFAULT_RESUME}
    return env


def _plan(pod: PodPlan, container: ContainerPlan, user_env: Mapping[str, str]) -> PodPlan:
    """Return the part of the plan that one supervisor runs, without the user's variables, which the container has already.

    One variable may hold 128 KiB, so they are not repeated for each process.
    """
    processes = tuple(_without(process, user_env) for process in container.processes)
    return replace(pod, role=container.image_role, containers=(replace(container, processes=processes),))


def _without(process: ProcessPlan, user_env: Mapping[str, str]) -> ProcessPlan:
    return replace(process, env={key: value for key, value in process.env.items() if user_env.get(key) != value})


def _variables(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return `env` for a container, literally: Kubernetes would expand `$(NAME)` and read `$$` as `$`."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in sorted(env.items())]


_POD_IP: dict[str, Any] = {
    "name": "RLJOB_POD_IP",
    "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
}


def _ports(container: ContainerPlan, health: int, *, first: bool) -> dict[str, int]:
    """Return the ports of a container by name; `first` says whether it is the first one of its pod."""
    port_numbers = {"metrics" if first else f"metrics-{container.name}": health}  # a pod's port names are unique
    for process in container.processes:
        port_numbers |= process.ports
        for name in ("rpc", "endpoint"):
            if number := process.env.get(f"RLJOB_{name.upper()}_PORT"):
                port_numbers[name] = int(number)
    return port_numbers


def _resources(spec: RoleSpec, pod: PodPlan) -> dict[str, Any]:
    """Return the resource requests of a container, with accelerators as a resource of the device plugin or as claims."""
    resources: dict[str, Any] = meta.api(spec.resources)
    if claims.by_device_plugin(spec, pod):
        for field in ("requests", "limits"):
            resources[field] = {**resources.get(field, {}), spec.gpu_resource: str(spec.gpus)}
    if claim_references := claims.references(spec, pod):
        resources["claims"] = claim_references
    return resources


def _probes(port: int) -> dict[str, Any]:
    def get(path: str, **more: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, **more}

    return {
        "startupProbe": get("/healthz", periodSeconds=1, failureThreshold=120, timeoutSeconds=5),
        "livenessProbe": get("/healthz", periodSeconds=10, failureThreshold=3, timeoutSeconds=5),
        "readinessProbe": get("/readyz", periodSeconds=2, failureThreshold=2, timeoutSeconds=5),
    }
