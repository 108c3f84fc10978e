"""Volumes a role may mount: claims, ConfigMaps, Secrets, scratch space, images, NFS and inline CSI. hostPath cannot be expressed."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import AnnotationMap, LabelMap, Name, Pattern, Quantity, ResourceMap, ShortName
from rl_core.api.cel import Cel, exactly_one_given, literal
from rl_core.api.key_secrets import key_secret, no_key_secret

FileMode = Annotated[int, Field(ge=0, le=0o777)]
FilePath = Annotated[str, Field(min_length=1, max_length=253)]
MountPath = Annotated[
    str,
    Field(max_length=1024),
    Pattern(
        regex=r"(/\.?[^/:.][^/:]*)+/?",
        rule="an absolute path without :, // and ..",
        way_out="begin it with / and name a folder",
    ),
]


OWN_PREFIX = "rljob-"
"""Names of volumes that the operator adds begin so."""
RESERVED_PATHS = r"/(etc/rljob|dev|proc|sys)(/.*)?"
"""Where the operator mounts keys and configuration, and the kernel its own."""


class KeyToPath(Spec):
    """One key of a ConfigMap or Secret as a file."""

    key: Name
    """Key in the object."""
    path: FilePath
    """Path below the mount."""
    mode: FileMode | None = None
    """File mode; null = defaultMode."""


Items = Annotated[list[KeyToPath], Field(max_length=32)]


class ConfigMapVolume(Spec):
    """Files from a ConfigMap."""

    name: Name
    """The ConfigMap."""
    items: Items = []
    """Keys to show; empty = all."""
    optional: bool = False
    """Whether the ConfigMap may be absent."""
    default_mode: FileMode | None = None
    """File mode; null = 0644."""


class SecretVolume(Spec):
    """Files from a Secret."""

    secret_name: Name
    """The Secret."""
    items: Items = []
    """Keys to show; empty = all."""
    optional: bool = False
    """Whether the Secret may be absent."""
    default_mode: FileMode | None = None
    """File mode; null = 0644."""

    @rule(no_key_secret("secretName"))
    def _no_keys(self) -> Iterator[str]:
        yield from key_secret("secretName", self.secret_name)


class ClaimVolume(Spec):
    """A PersistentVolumeClaim."""

    claim_name: Name
    """The claim, in the job's namespace."""
    read_only: bool = False
    """Mount without write access."""


class EmptyDirVolume(Spec):
    """Scratch space that lives as long as the pod."""

    medium: Literal["", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"] = ""
    """Memory = tmpfs, counted as memory of the pod; HugePages = of the size that resources names, or of the named one."""
    size_limit: Quantity | None = None
    """Largest size; null = unbounded."""


class ImageVolume(Spec):
    """The content of an OCI image, read-only."""

    reference: Annotated[str, Field(min_length=1, max_length=512)]
    """The image."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When it is pulled; null = the cluster's default."""


class NfsVolume(Spec):
    """A folder of an NFS server; the namespace must not enforce Pod Security `restricted`."""

    server: Annotated[str, Field(min_length=1, max_length=253)]
    """Host name or address; one of the chart value policy.allowedNfsServers."""
    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Folder that the server exports."""
    read_only: bool = False
    """Mount without write access."""


class SecretName(Spec):
    """A Secret for a driver."""

    name: Name
    """The Secret."""

    @rule(no_key_secret("name"))
    def _no_keys(self) -> Iterator[str]:
        yield from key_secret("name", self.name)


class CsiVolume(Spec):
    """A volume that a CSI driver makes for the pod, without a claim."""

    driver: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the driver; one of the chart value policy.allowedCsiDrivers."""
    read_only: bool = False
    """Mount without write access."""
    fs_type: Annotated[str, Field(max_length=32)] | None = None
    """File system, e.g. ext4; null = the driver's default."""
    volume_attributes: AnnotationMap = {}
    """Settings of the driver."""
    node_publish_secret_ref: SecretName | None = None
    """Secret that the driver gets for mounting."""


class ProjectedConfigMap(Spec):
    """A ConfigMap inside a projected volume."""

    name: Name
    """The ConfigMap."""
    items: Items = []
    """Keys to show; empty = all."""
    optional: bool = False
    """Whether the ConfigMap may be absent."""


class ProjectedSecret(Spec):
    """A Secret inside a projected volume."""

    name: Name
    """The Secret."""
    items: Items = []
    """Keys to show; empty = all."""
    optional: bool = False
    """Whether the Secret may be absent."""

    @rule(no_key_secret("name"))
    def _no_keys(self) -> Iterator[str]:
        yield from key_secret("name", self.name)


class ProjectedSource(Spec):
    """One source of a projected volume: exactly one of its fields."""

    config_map: ProjectedConfigMap | None = None
    """Files from a ConfigMap."""
    secret: ProjectedSecret | None = None
    """Files from a Secret."""

    @rule(exactly_one_given("a source of a projected volume", ("config_map", "secret")))
    def _one_source(self) -> Iterator[str]:
        yield from exactly_one(self, "a source of a projected volume", ("config_map", "secret"))


class ProjectedVolume(Spec):
    """Several sources in one folder."""

    sources: Annotated[list[ProjectedSource], Field(min_length=1, max_length=8)]
    """What is shown."""
    default_mode: FileMode | None = None
    """File mode; null = 0644."""


class ClaimResources(Spec):
    """Size of a claim."""

    requests: ResourceMap = {}
    """storage: size."""
    limits: ResourceMap = {}
    """Upper bounds."""


class ClaimSpec(Spec):
    """What a claim asks for."""

    access_modes: Annotated[
        list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]],
        Field(min_length=1, max_length=4),
    ] = ["ReadWriteOnce"]
    """How it may be mounted."""
    storage_class_name: Name | None = None
    """Storage class; null = the cluster's default."""
    volume_mode: Literal["Filesystem"] = "Filesystem"
    """Block devices cannot be mounted by roles."""
    resources: ClaimResources
    """Size."""


class ClaimMetadata(Spec):
    """Labels and annotations of a claim made for a pod."""

    labels: LabelMap = {}
    """Labels."""
    annotations: AnnotationMap = {}
    """Annotations."""


class ClaimTemplate(Spec):
    """A claim made for each pod, deleted with it."""

    metadata: ClaimMetadata = ClaimMetadata()
    """Labels and annotations."""
    spec: ClaimSpec
    """What it asks for."""


class EphemeralVolume(Spec):
    """A claim that lives as long as the pod."""

    volume_claim_template: ClaimTemplate
    """The claim."""


VOLUME_KINDS = (
    "persistent_volume_claim",
    "ephemeral",
    "config_map",
    "secret",
    "empty_dir",
    "projected",
    "image",
    "nfs",
    "csi",
)


class Volume(Spec):
    """A volume: its name and exactly one kind."""

    name: ShortName
    """Name, unique in the role."""
    persistent_volume_claim: ClaimVolume | None = None
    """A PersistentVolumeClaim."""
    ephemeral: EphemeralVolume | None = None
    """A claim made for each pod."""
    config_map: ConfigMapVolume | None = None
    """Files from a ConfigMap."""
    secret: SecretVolume | None = None
    """Files from a Secret."""
    empty_dir: EmptyDirVolume | None = None
    """Scratch space."""
    projected: ProjectedVolume | None = None
    """Several sources in one folder."""
    image: ImageVolume | None = None
    """Content of an OCI image."""
    nfs: NfsVolume | None = None
    """A folder of an NFS server."""
    csi: CsiVolume | None = None
    """A volume that a CSI driver makes for the pod."""

    @rule(
        Cel(
            holds=f"!self.name.startsWith({literal(OWN_PREFIX)})",
            refusal=f"name must not begin with {OWN_PREFIX}, which the operator's own volumes do, got %s; rename it",
            values=("self.name",),
            field="name",
        )
    )
    def _name_is_free(self) -> Iterator[str]:
        if self.name.startswith(OWN_PREFIX):
            yield f"name must not begin with {OWN_PREFIX}, which the operator's own volumes do, got {self.name}; rename it"

    @rule(exactly_one_given("a volume", VOLUME_KINDS))
    def _one_kind(self) -> Iterator[str]:
        yield from exactly_one(self, "a volume", VOLUME_KINDS)


class VolumeMount(Spec):
    """Where a container sees a volume."""

    name: ShortName
    """A volume of the role."""
    mount_path: MountPath
    """Absolute path in the container."""
    sub_path: FilePath | None = None
    """Folder or file inside the volume; null = its root."""
    read_only: bool = False
    """Mount without write access."""

    @rule(
        Cel(
            holds=f"!self.mountPath.matches({literal(f'^{RESERVED_PATHS}$')})",
            refusal="mountPath must not be in /etc/rljob, /dev, /proc or /sys, got %s; choose another folder",
            values=("self.mountPath",),
            field="mountPath",
        )
    )
    def _path_is_free(self) -> Iterator[str]:
        if re.fullmatch(RESERVED_PATHS, self.mount_path):
            yield f"mountPath must not be in /etc/rljob, /dev, /proc or /sys, got {self.mount_path}; choose another folder"


def exactly_one(spec: Spec, what: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield a message unless exactly one of the fields `names` is given."""
    num_given = sum(getattr(spec, name) is not None for name in names)
    if num_given != 1:
        aliases = [type(spec).model_fields[name].alias or name for name in names]
        yield f"{what} must have exactly one of {', '.join(aliases)}, got {num_given}; give one"
