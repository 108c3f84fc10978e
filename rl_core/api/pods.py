"""The pod fields that a role may set. Local runs ignore them, so that the same file runs on a laptop and on a cluster.

These fields are the security boundary of the job resource: host namespaces, privileges, hostPath, nodeName and a service account token
cannot be requested. RDMA needs locked memory, and perhaps the network of the host (roles.FabricRoleSpec); the policy of the chart refuses both
unless an administrator allows them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.affinity import Affinity, Toleration, TopologySpread
from rl_core.api.base import Spec, rule
from rl_core.api.bounds import AnnotationMap, EnvMap, LabelMap, Name, Pattern, Quantity, ResourceMap, ShortName, listed
from rl_core.api.cel import Cel, exactly_one_given, literal, no_keys, unique
from rl_core.api.variables import (
    ONE_VALUE_EACH,
    PROTECTED_VARIABLES,
    EnvFrom,
    EnvValues,
    protected_env,
    twice_set,
)
from rl_core.api.volumes import Volume, VolumeMount, exactly_one

Image = Annotated[str, Field(min_length=1, max_length=512)]
GroupId = Annotated[int, Field(ge=0, lt=2**31)]
Words = Annotated[list[str], Field(max_length=64)]
GPU_RESOURCE = "nvidia.com/gpu"
OWNED_LABELS = ("rljob.dev/", "app.kubernetes.io/")
"""Prefixes of labels that the operator sets."""
OWNED_ANNOTATIONS = (
    "rljob.dev/",
    "cdi.k8s.io/",
    "io.kubernetes.cri-o.",
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
"""Prefixes of annotations that the operator sets, and of those that would give a pod devices or rights outside the curated fields."""
GpuResource = Annotated[
    str,
    Field(max_length=253),
    Pattern(
        regex=r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?",
        rule="a resource of a device plugin such as nvidia.com/gpu",
        way_out="write vendor/resource",
    ),
]
OWN_CLAIM = "gpus"
"""Name in the pod of the claim for the role's `gpus`."""
KNOWN_VOLUME = "has(self.volumes) && self.volumes.exists(v, v.name == m.name)"
VOLUME_NAMES = "has(self.volumes) ? self.volumes.map(v, v.name) : []"
MOUNTS_KNOWN = f"!has(c.volumeMounts) || c.volumeMounts.all(m, {KNOWN_VOLUME})"
"""CEL of: the mount `m` names a volume of the role, the names there are, all mounts of the init container `c` do."""


class ObjectName(Spec):
    """An object of the job's namespace."""

    name: Name
    """Its name."""


class Resources(Spec):
    """CPU, memory and further resources; accelerators are `gpus`."""

    requests: ResourceMap = {}
    """Requests: what is reserved for the container."""
    limits: ResourceMap = {}
    """Limits: the most that the container may use."""

    @rule(
        *(
            Cel(
                holds=f"!({literal(GPU_RESOURCE)} in ${field})",
                refusal=f"resources.{field} must not name {GPU_RESOURCE}, got %s; set the role's gpus instead",
                values=(f"string(self.{field}[{literal(GPU_RESOURCE)}])",),
                field=field,
            )
            for field in ("requests", "limits")
        )
    )
    def _no_gpus(self) -> Iterator[str]:
        for field, values in (("requests", self.requests), ("limits", self.limits)):
            if GPU_RESOURCE in values:
                yield f"resources.{field} must not name {GPU_RESOURCE}, got {values[GPU_RESOURCE]}; set the role's gpus instead"


class ResourceClaim(Spec):
    """A claim for devices (DRA): exactly one of resourceClaimName and resourceClaimTemplateName."""

    name: ShortName
    """Name in the pod."""
    resource_claim_name: Name | None = None
    """A claim that exists; shared by all pods of the role."""
    resource_claim_template_name: Name | None = None
    """A template; each pod gets a claim of its own."""
    request: ShortName | None = None
    """Request inside the claim that the containers use; null = all."""

    @rule(exactly_one_given("an entry of resourceClaims", ("resource_claim_name", "resource_claim_template_name")))
    def _one_source(self) -> Iterator[str]:
        yield from exactly_one(
            self, "an entry of resourceClaims", ("resource_claim_name", "resource_claim_template_name")
        )

    @rule(
        Cel(
            holds=f"self.name != {literal(OWN_CLAIM)}",
            refusal=f"name must not be {OWN_CLAIM}, which is the claim of the role's gpus, got %s; rename it",
            values=("self.name",),
            field="name",
        )
    )
    def _name_is_free(self) -> Iterator[str]:
        if self.name == OWN_CLAIM:
            yield f"name must not be {OWN_CLAIM}, which is the claim of the role's gpus, got {self.name}; rename it"


class SeccompProfile(Spec):
    """The system calls a container may use."""

    type: Literal["RuntimeDefault"] = "RuntimeDefault"
    """The container runtime's profile."""


class Capabilities(Spec):
    """Rights of the kernel; all but those named are dropped."""

    add: Annotated[list[Literal["IPC_LOCK"]], Field(max_length=1)] = []
    """IPC_LOCK: memory may be locked, as RDMA needs; only where the chart value policy.allowIpcLock is true."""


class SecurityContext(Spec):
    """The part of the security context that may be chosen; the rest is fixed (non-root, no escalation)."""

    run_as_user: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """User id; null = 1000. Never 0."""
    run_as_group: GroupId | None = None
    """Group id; null = 1000."""
    fs_group: GroupId | None = None
    """Group that owns mounted volumes; null = 1000."""
    supplemental_groups: Annotated[list[GroupId], Field(max_length=16)] = []
    """Further groups."""
    read_only_root_filesystem: bool = True
    """Whether the image's files are read-only; /tmp is always writable."""
    seccomp_profile: SeccompProfile = SeccompProfile()
    """RuntimeDefault."""
    capabilities: Capabilities = Capabilities()
    """Rights of the kernel for the role's container."""


class InitContainer(Spec):
    """Runs before the role's container starts, at each start of the pod; fetches or prepares a model or data. A sidecar runs beside it."""

    name: ShortName
    """Name, unique in the role; not the role's own."""
    image: Image | None = None
    """Image; null = the role's."""
    command: Words = []
    """Entry point; empty = the image's."""
    args: Words = []
    """Arguments."""
    env: EnvMap = {}
    """Environment variables."""
    env_value_from: EnvValues = []
    """Environment variables whose values stand elsewhere."""
    resources: Resources = Resources()
    """CPU, memory."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32)] = []
    """Volume mounts; the volumes are those of the role."""
    restart_policy: Literal["Always"] | None = None
    """Always = a sidecar: it starts before the role's container, runs beside it and ends after it; null = it runs to completion."""

    @rule(PROTECTED_VARIABLES)
    def _protected(self) -> Iterator[str]:
        yield from protected_env(self.env)

    @rule(ONE_VALUE_EACH)
    def _one_value_each(self) -> Iterator[str]:
        yield from twice_set(self.env, self.env_value_from)


class DnsOption(Spec):
    """One option of the resolver."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Its name, e.g. ndots."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Its value; null = an option without one."""


class DnsConfig(Spec):
    """DNS settings, added to those of the cluster."""

    nameservers: Annotated[list[Annotated[str, Field(max_length=45)]], Field(max_length=3)] = []
    """Addresses of further name servers; env pods need them in `egress` too."""
    searches: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=32)] = []
    """Further domains to search."""
    options: Annotated[list[DnsOption], Field(max_length=16)] = []
    """Further options of the resolver."""


class PodSpec(Spec):
    """Pod settings that a role may choose, on a cluster."""

    env: EnvMap = {}
    """Additional environment variables of the processes; the variables that rljob sets itself cannot be set."""
    image: Image | None = None
    """Container image; null = the operator's image of the role."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled; null = the operator's setting."""
    image_pull_secrets: Annotated[list[ObjectName], Field(max_length=8)] = []
    """Secrets with registry credentials."""
    env_from: Annotated[list[EnvFrom], Field(max_length=16)] = []
    """Environment variables from ConfigMaps and Secrets; `env` and the variables of the operator take precedence."""
    env_value_from: EnvValues = []
    """Environment variables from one key of a ConfigMap or Secret, or from a field of the pod; the variables of the operator take precedence."""
    resources: Resources = Resources()
    """CPU, memory and further resources of the role's container."""
    gpu_resource: GpuResource = GPU_RESOURCE
    """Name of the device plugin's resource that `gpus` counts, e.g. nvidia.com/mig-1g.10gb. The devices must be of NVIDIA."""
    gpu_allocation: Literal["devicePlugin", "dra"] = "devicePlugin"
    """How `gpus` are requested. devicePlugin: as the resource gpuResource; dra: by a ResourceClaim of deviceClass."""
    device_class: Name | None = None
    """DeviceClass of `gpus` with gpuAllocation dra."""
    resource_claims: Annotated[list[ResourceClaim], Field(max_length=8)] = []
    """Further claims for devices."""
    node_selector: LabelMap = {}
    """Labels a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints the pods tolerate."""
    affinity: Affinity | None = None
    """Scheduling constraints."""
    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = []
    """Topology spread constraints."""
    volumes: Annotated[list[Volume], Field(max_length=32)] = []
    """Volumes; rollouts and envs need none for model, data and checkpoints."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32)] = []
    """Volume mounts of the container of the role."""
    init_containers: Annotated[list[InitContainer], Field(max_length=8)] = []
    """Containers that run to completion, in order, before the container of the role; those with restartPolicy Always are sidecars."""
    service_account_name: Name | None = None
    """Service account; null = default. Its token is never mounted."""
    priority_class_name: Name | None = None
    """Priority class; null = the cluster's default."""
    runtime_class_name: Name | None = None
    """Runtime class; null = the cluster's default."""
    scheduler_name: Name | None = None
    """Scheduler; null = the cluster's default."""
    dns_config: DnsConfig = DnsConfig()
    """DNS settings of the pods, added to those of the cluster."""
    security_context: SecurityContext = SecurityContext()
    """The part of the security context that may be chosen."""
    termination_grace_period_seconds: int = Field(30, ge=1, le=86400)
    """Seconds between the request to stop and the kill."""
    labels: LabelMap = {}
    """Further labels of the pods."""
    annotations: AnnotationMap = {}
    """Further annotations of the pods."""
    shm_size: Quantity | None = None
    """Size of /dev/shm, which is memory of the pod; null = limited only by the memory of the pod."""

    @rule(PROTECTED_VARIABLES)
    def _protected(self) -> Iterator[str]:
        yield from protected_env(self.env)

    @rule(ONE_VALUE_EACH)
    def _one_value_each(self) -> Iterator[str]:
        yield from twice_set(self.env, self.env_value_from)

    @rule(
        *(
            Cel(
                holds=f"!has(self.resources) || !has(self.resources.{field}) || !($gpuResource in self.resources.{field})",
                refusal=f"resources.{field} must not name the role's gpuResource, got %s; set the role's gpus instead",
                values=("$gpuResource",),
                field="resources",
            )
            for field in ("requests", "limits")
        )
    )
    def _gpus_are_counted(self) -> Iterator[str]:
        if self.gpu_resource == GPU_RESOURCE:
            return  # The rules of `resources` refuse it already, for init containers too.
        for field, values in (("requests", self.resources.requests), ("limits", self.resources.limits)):
            if self.gpu_resource in values:
                yield f"resources.{field} must not name the role's gpuResource, got {self.gpu_resource}; set the role's gpus instead"

    @rule(
        Cel(
            holds="!has(self.deviceClass) || $gpuAllocation == 'dra'",
            refusal="deviceClass needs gpuAllocation dra, got %s; set gpuAllocation: dra or remove deviceClass",
            values=("$gpuAllocation",),
            field="deviceClass",
        )
    )
    def _device_class(self) -> Iterator[str]:
        if self.device_class is not None and self.gpu_allocation != "dra":
            yield f"deviceClass needs gpuAllocation dra, got {self.gpu_allocation}; set gpuAllocation: dra or remove deviceClass"

    @rule(
        no_keys(
            "labels",
            " || ".join(f"k.startsWith({literal(prefix)})" for prefix in OWNED_LABELS),
            f"labels must not start with {' or '.join(OWNED_LABELS)}, which the operator sets, got %s; rename them",
        )
    )
    def _labels_are_free(self) -> Iterator[str]:
        reserved = sorted(key for key in self.labels if key.startswith(OWNED_LABELS))
        if reserved:
            yield f"labels must not start with {' or '.join(OWNED_LABELS)}, which the operator sets, got {listed(reserved)}; rename them"

    @rule(
        no_keys(
            "annotations",
            " || ".join(f"k.startsWith({literal(prefix)})" for prefix in OWNED_ANNOTATIONS),
            "annotations must not start with rljob.dev/ or set apparmor, seccomp or devices, which the operator does, got %s; remove them",
        )
    )
    def _annotations_are_free(self) -> Iterator[str]:
        reserved = sorted(key for key in self.annotations if key.startswith(OWNED_ANNOTATIONS))
        if reserved:
            yield f"annotations must not start with rljob.dev/ or set apparmor, seccomp or devices, which the operator does, got {listed(reserved)}; remove them"

    @rule(
        *(unique(field, "name") for field in ("volumes", "initContainers", "resourceClaims")),
        unique("volumeMounts", "mountPath"),
    )
    def _names_areunique(self) -> Iterator[str]:
        keyed = {
            "volumes": ("names", [volume.name for volume in self.volumes]),
            "initContainers": ("names", [container.name for container in self.init_containers]),
            "resourceClaims": ("names", [claim.name for claim in self.resource_claims]),
            "volumeMounts": ("mountPaths", [mount.mount_path for mount in self.volume_mounts]),
        }
        for field, (keys, values) in keyed.items():
            if repeated := [value for value in values if values.count(value) > 1]:
                yield f"{field} must have unique {keys}, got {repeated[0]} more than once; change one"

    @rule(
        Cel(
            holds=f"!has(self.volumeMounts) || self.volumeMounts.all(m, {KNOWN_VOLUME})",
            refusal="volumeMounts must name a volume of the role, %s, got %s; add it to volumes or correct the name",
            values=(VOLUME_NAMES, f"self.volumeMounts.filter(m, !({KNOWN_VOLUME})).map(m, m.name)"),
            field="volumeMounts",
        ),
        Cel(
            holds=f"!has(self.initContainers) || self.initContainers.all(c, {MOUNTS_KNOWN})",
            refusal="volumeMounts of init containers must name a volume of the role, %s, got others in %s; add it to volumes or correct the name",
            values=(VOLUME_NAMES, f"self.initContainers.filter(c, !({MOUNTS_KNOWN})).map(c, c.name)"),
            field="initContainers",
        ),
    )
    def _mounts_name_volumes(self) -> Iterator[str]:
        names = [volume.name for volume in self.volumes]
        if unknown := [mount.name for mount in self.volume_mounts if mount.name not in names]:
            yield f"volumeMounts must name a volume of the role, {listed(names)}, got {listed(unknown)}; add it to volumes or correct the name"
        invalid = [
            item.name for item in self.init_containers if {mount.name for mount in item.volume_mounts} - set(names)
        ]
        if invalid:
            yield f"volumeMounts of init containers must name a volume of the role, {listed(names)}, got others in {listed(invalid)}; add it to volumes or correct the name"
