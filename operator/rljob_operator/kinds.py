"""The kinds of objects that the operator uses, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One namespaced resource of the API."""

    group: str
    """API group; empty for the core group."""
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        """`group/version` as objects carry it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection, an object or its subresource; namespace None = all namespaces."""
        parts = ["/apis/" + self.group if self.group else "/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/".join(parts)


RLJOB = Kind(group="rljob.dev", version="v1alpha1", kind="RLJob", plural="rljobs")
POD = Kind(group="", version="v1", kind="Pod", plural="pods")
SERVICE = Kind(group="", version="v1", kind="Service", plural="services")
CONFIG_MAP = Kind(group="", version="v1", kind="ConfigMap", plural="configmaps")
SECRET = Kind(group="", version="v1", kind="Secret", plural="secrets")
CLAIM = Kind(group="", version="v1", kind="PersistentVolumeClaim", plural="persistentvolumeclaims")
EVENT = Kind(group="", version="v1", kind="Event", plural="events")
LEASE = Kind(group="coordination.k8s.io", version="v1", kind="Lease", plural="leases")
NETWORK_POLICY = Kind(group="networking.k8s.io", version="v1", kind="NetworkPolicy", plural="networkpolicies")
BUDGET = Kind(group="policy", version="v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets")
CLAIM_TEMPLATE = Kind(
    group="resource.k8s.io", version="v1", kind="ResourceClaimTemplate", plural="resourceclaimtemplates"
)

SUPPORT = (SERVICE, CONFIG_MAP, NETWORK_POLICY, BUDGET, CLAIM_TEMPLATE)
"""Kinds of objects that a job owns besides pods and its Secret. They are watched and updated by server-side apply."""

OWNED = (POD, *SUPPORT)
"""Kinds that are watched by the operator's labels."""

WATCHED = (RLJOB, *OWNED)

_BY_KIND = {kind.kind: kind for kind in (*WATCHED, SECRET, CLAIM, EVENT, LEASE)}


def by_name(kind: str) -> Kind:
    """Return the Kind of this name. Raises KeyError for a kind that the operator does not use."""
    return _BY_KIND[kind]


def of(obj_api_version: str, kind: str) -> Kind:
    """Return the Kind of an object to apply; gang objects of other groups are made from their apiVersion."""
    found_kind = _BY_KIND.get(kind)
    if found_kind is not None and found_kind.api_version == obj_api_version:
        return found_kind
    group, _, version = obj_api_version.rpartition("/")
    return Kind(group=group, version=version, kind=kind, plural=_plural(kind))


def _plural(kind: str) -> str:
    lower = kind.lower()
    return lower[:-1] + "ies" if lower.endswith("y") else lower + "s"
