"""The operator's settings, read from the environment once at start.

Every variable begins with `RLJOB_OPERATOR_`. The chart sets them from its values; a person who runs `python -m rljob_operator`
by hand needs none of them.

| variable | default | meaning |
| --- | --- | --- |
| NAMESPACE | rljob-system | where the Lease and the master key's Secret live |
| WATCH_NAMESPACES | empty | comma list of namespaces to serve; empty = all |
| IDENTITY | host name and a random suffix | holder written into the Lease |
| IMAGE_ACTOR, IMAGE_ROLLOUT, IMAGE_ENV | empty | image of a group where the job names none |
| IMAGE_PULL_POLICY | empty | pull policy where the job names none |
| METRICS_NAMESPACE_LABELS | rljob.dev/metrics=true | label of namespaces whose pods may scrape the jobs, `key=value` comma list |
| DNS_NAMESPACE_LABELS | kubernetes.io/metadata.name=kube-system | label of the namespace of the cluster's DNS, `key=value` comma list |
| DNS_POD_LABELS | k8s-app=kube-dns | label of the pods of the cluster's DNS, `key=value` comma list |
| DNS_CIDRS | 169.254.20.10/32 | comma list of addresses of DNS that is no pod; `none` = there are none |
| WORKERS | 16 | jobs reconciled at the same time |
| CREATES_IN_FLIGHT | 32 | object creations in flight per job |
| API_IN_FLIGHT | 64 | object creations in flight in all, shared fairly between jobs |
| LEASE_SECONDS | 15 | how long a silent leader keeps the Lease; renewed every third of it |
| LEADER_ELECT | true | false = serve without a Lease (one replica, tests) |
| RESYNC_SECONDS | 600 | each job is reconciled at least this often |
| RELIST_SECONDS | 300 | each kind is listed anew this often |
| METRICS_PORT | 8080 | port of /metrics, /healthz and /readyz; 0 = a free one |
| METRICS_HOST | 0.0.0.0 | address of the same |
| POLL_SECONDS | 5 | least interval between two looks at one runner's /status |
| PROGRESS_SECONDS | 10 | least interval between two progress writes of one job |
| VERSION | that of the package | label app.kubernetes.io/version of all objects |
| LOG_LEVEL | INFO | DEBUG, INFO, WARNING or ERROR |
| LOG_FORMAT | json | json or text |
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rl_core.plan.groups import BUILT_IN
from rljob_operator.model import OperatorConfig

PREFIX = "RLJOB_OPERATOR_"
NONE = "none"
"""Stands for an empty list, since an empty variable stands for the default."""

T = TypeVar("T")


class SettingError(ValueError):
    """An environment variable has an invalid value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of the process besides `OperatorConfig`. Times are in seconds."""

    config: OperatorConfig = field(default_factory=OperatorConfig)
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces served; empty = all."""
    identity: str = "rljob-operator"
    """Holder identity in the Lease; must differ between replicas."""
    workers: int = 16
    creates_in_flight: int = 32
    api_in_flight: int = 64
    lease_seconds: float = 15.0
    leader_elect: bool = True
    resync_seconds: float = 600.0
    relist_seconds: float = 300.0
    metrics_port: int = 8080
    metrics_host: str = "0.0.0.0"
    poll_seconds: float = 5.0
    progress_seconds: float = 10.0
    log_level: str = "INFO"
    log_format: Literal["json", "text"] = "json"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read the variables of the table above. Raises SettingError with the variable, its rule and its value."""
        reader = _Reader(env)
        config = _config(reader)
        return cls(
            config=config,
            watch_namespaces=_served(reader, config.namespace),
            identity=reader.text("IDENTITY", f"{socket.gethostname()}-{secrets.token_hex(3)}"),
            workers=reader.number("WORKERS", 16, kind=int, least=1),
            creates_in_flight=reader.number("CREATES_IN_FLIGHT", 32, kind=int, least=1),
            api_in_flight=reader.number("API_IN_FLIGHT", 64, kind=int, least=1),
            lease_seconds=reader.number("LEASE_SECONDS", 15.0, kind=float, least=1.0),
            leader_elect=reader.flag("LEADER_ELECT", default=True),
            resync_seconds=reader.number("RESYNC_SECONDS", 600.0, kind=float, least=1.0),
            relist_seconds=reader.number("RELIST_SECONDS", 300.0, kind=float, least=1.0),
            metrics_port=reader.number("METRICS_PORT", 8080, kind=int, least=0),
            metrics_host=reader.text("METRICS_HOST", "0.0.0.0"),
            poll_seconds=reader.number("POLL_SECONDS", 5.0, kind=float, least=0.1),
            progress_seconds=reader.number("PROGRESS_SECONDS", 10.0, kind=float, least=0.0),
            log_level=reader.choice("LOG_LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR"), "INFO"),
            log_format=reader.choice("LOG_FORMAT", ("json", "text"), "json"),  # type: ignore[arg-type]
        )


def _served(reader: _Reader, own_namespace: str) -> tuple[str, ...]:
    """Return the namespaces to serve.

    Raises SettingError for the operator's own one: pods of jobs must not be able to read its master key.
    """
    namespaces = reader.names("WATCH_NAMESPACES")
    if own_namespace in namespaces:
        raise SettingError(
            f"{PREFIX}WATCH_NAMESPACES must not name the operator's own namespace, got {own_namespace!r}; remove it"
        )
    return namespaces


def _config(reader: _Reader) -> OperatorConfig:
    defaults = OperatorConfig()
    return OperatorConfig(
        namespace=reader.text("NAMESPACE", defaults.namespace),
        images={group: image for group in BUILT_IN if (image := reader.text(f"IMAGE_{group.upper()}", ""))},
        image_pull_policy=reader.text("IMAGE_PULL_POLICY", "") or None,
        metrics_namespace_labels=reader.pairs("METRICS_NAMESPACE_LABELS", defaults.metrics_namespace_labels),
        dns_namespace_labels=reader.pairs("DNS_NAMESPACE_LABELS", defaults.dns_namespace_labels),
        dns_pod_labels=reader.pairs("DNS_POD_LABELS", defaults.dns_pod_labels),
        dns_cidrs=_cidrs(reader, defaults.dns_cidrs),
        version=reader.text("VERSION", defaults.version),
    )


def _cidrs(reader: _Reader, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the address blocks of DNS; raises SettingError for text that is none."""
    cidrs = reader.names("DNS_CIDRS")
    if cidrs == (NONE,):
        return ()
    for cidr in cidrs:
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise SettingError(
                f"{PREFIX}DNS_CIDRS must be a comma list of address blocks or {NONE}, got {cidr!r}"
            ) from error
    return cidrs or default


class _Reader:
    """Reads typed values from environment variables. An empty value counts as absent."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str) -> str:
        return self._env.get(PREFIX + name, "").strip() or default

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.text(name, "").split(",") if part.strip())

    def pairs(self, name: str, default: Mapping[str, str]) -> Mapping[str, str]:
        parts = self.names(name)
        if not parts:
            return default
        if invalid := next((part for part in parts if "=" not in part), None):
            raise SettingError(f"{PREFIX}{name} must be a comma list of key=value, got {invalid!r}")
        return dict(part.split("=", 1) for part in parts)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise SettingError(f"{PREFIX}{name} must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return self.choice(name, ("true", "false"), "true" if default else "false") == "true"

    def number(self, name: str, default: T, *, kind: Callable[[str], T], least: float) -> T:
        text = self.text(name, "")
        if not text:
            return default
        rule = f"{PREFIX}{name} must be a number of at least {least:g}, got {text!r}"
        try:
            value = kind(text)
        except ValueError as error:
            raise SettingError(rule) from error
        if not value >= least:  # type: ignore[operator]
            raise SettingError(rule)
        return value
