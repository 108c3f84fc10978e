"""Environment variables of the containers of a role, from ConfigMaps, Secrets and pod fields. Variables that rljob sets itself are refused."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import Name, Pattern, ShortName, listed
from rl_core.api.cel import Cel, exactly_one_given, literal, no_keys
from rl_core.api.key_secrets import key_secret, no_key_secret
from rl_core.api.volumes import exactly_one

PROTECTED_ENV = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_NAME",
        "WORKER_NAME",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    ]
)
"""Variables that identity and devices hang on. With NVIDIA_VISIBLE_DEVICES a container could see GPUs of others."""
_OWNED = f"{{0}}.startsWith('RLJOB_') || {{0}} in {literal(sorted(PROTECTED_ENV))}"
PROTECTED_VARIABLES = no_keys(
    "env", _OWNED.format("k"), "env must not set variables the launcher owns, got %s; remove them"
)
SOURCES = ("config_map_key_ref", "secret_key_ref", "field_ref", "resource_field_ref")
KeyName = Annotated[str, Field(min_length=1, max_length=253)]
VariableName = Annotated[
    str,
    Field(max_length=128),
    Pattern(
        regex=r"[-._a-zA-Z][-._a-zA-Z0-9]*",
        rule="the name of a variable (letters, digits, -, . and _, no digit first)",
        way_out="rename it",
    ),
]
FieldPath = Annotated[
    str,
    Field(max_length=400),
    Pattern(
        regex=r"metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]|spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs)",
        rule="a field of the pod such as spec.nodeName or status.podIP",
        way_out="choose such a field",
    ),
]
ResourcePath = Annotated[
    str,
    Field(max_length=64),
    Pattern(
        regex=r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i)",
        rule="limits or requests of cpu, memory, ephemeral-storage or hugepages",
        way_out="write it as limits.memory",
    ),
]


class EnvSource(Spec):
    """A ConfigMap or Secret whose keys become variables."""

    name: Name
    """Its name."""
    optional: bool = False
    """Whether it may be absent."""


class EnvFrom(Spec):
    """Variables from a ConfigMap or a Secret: exactly one of them."""

    prefix: Annotated[str, Field(max_length=64)] = ""
    """Put before each name."""
    config_map_ref: EnvSource | None = None
    """A ConfigMap."""
    secret_ref: EnvSource | None = None
    """A Secret."""

    @rule(exactly_one_given("an entry of envFrom", ("config_map_ref", "secret_ref")))
    def _one_source(self) -> Iterator[str]:
        yield from exactly_one(self, "an entry of envFrom", ("config_map_ref", "secret_ref"))

    @rule(no_key_secret("secretRef.name"))
    def _no_keys(self) -> Iterator[str]:
        yield from key_secret("secretRef.name", self.secret_ref.name if self.secret_ref is not None else None)


class KeyRef(Spec):
    """One key of a ConfigMap or Secret."""

    name: Name
    """Name of the object."""
    key: KeyName
    """The key whose value is taken."""
    optional: bool = False
    """Whether object or key may be absent; the variable then is not set."""


class FieldRef(Spec):
    """A field of the pod."""

    field_path: FieldPath
    """The field, e.g. spec.nodeName."""


class ResourceFieldRef(Spec):
    """What the container may use of a resource."""

    resource: ResourcePath
    """The resource, e.g. limits.memory."""
    container_name: ShortName | None = None
    """The container; null = the one with the variable."""


class EnvValueFrom(Spec):
    """A variable whose value stands elsewhere: exactly one source. (A list beside the map `env`, which holds plain values.)"""

    name: VariableName
    """Name of the variable; not one of `env`."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    field_ref: FieldRef | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """A resource of a container."""

    @rule(exactly_one_given("an entry of envValueFrom", SOURCES))
    def _one_source(self) -> Iterator[str]:
        yield from exactly_one(self, "an entry of envValueFrom", SOURCES)

    @rule(no_key_secret("secretKeyRef.name"))
    def _no_keys(self) -> Iterator[str]:
        yield from key_secret("secretKeyRef.name", self.secret_key_ref.name if self.secret_key_ref else None)

    @rule(
        Cel(
            holds=f"!({_OWNED.format('self.name')})",
            refusal="name must not be a variable the launcher owns, got %s; remove it",
            values=("self.name",),
            field="name",
        )
    )
    def _protected(self) -> Iterator[str]:
        if _is_owned(self.name):
            yield f"name must not be a variable the launcher owns, got {self.name}; remove it"


EnvValues = Annotated[list[EnvValueFrom], Field(max_length=64)]
ONE_VALUE_EACH = Cel(
    holds="!has(self.env) || !has(self.envValueFrom) || !self.envValueFrom.exists(v, v.name in self.env)",
    refusal="envValueFrom must not set variables of env, got %s; remove one of the two",
    values=("self.envValueFrom.filter(v, v.name in self.env).map(v, v.name)",),
    field="envValueFrom",
)
"""CEL of `twice_set`."""


def protected_env(env: dict[str, str]) -> Iterator[str]:
    """Yield a message when `env` sets a variable that the launcher owns."""
    if owned := sorted(filter(_is_owned, env)):
        yield f"env must not set variables the launcher owns, got {listed(owned)}; remove them"


def twice_set(env: dict[str, str], values: list[EnvValueFrom]) -> Iterator[str]:
    """Yield a message when a variable has a plain value and a source."""
    if repeated := [value.name for value in values if value.name in env]:
        yield f"envValueFrom must not set variables of env, got {listed(repeated)}; remove one of the two"


def _is_owned(name: str) -> bool:
    return name.startswith("RLJOB_") or name in PROTECTED_ENV
