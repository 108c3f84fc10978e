"""A `Cluster` that keeps which rights its requests need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from rljob_operator.errors import Forbidden
from rljob_operator.kinds import Kind
from rljob_operator.runtime.cluster import Cluster

Right = tuple[str, str, str]
"""(verb, API group, resource or resource/subresource)."""


def granted(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    """Return the rights that the rules of a role give."""
    return {(v, g, r) for rule in rules for v in rule["verbs"] for g in rule["apiGroups"] for r in rule["resources"]}


class Witness:
    """Passes every request on; `used` are the rights it took, `refused` those that were missing."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.used: set[Right] = set()
        self.refused: list[str] = []
        self._cluster = cluster

    def wrap(self, cluster: Cluster) -> Witness:
        """Return a witness before `cluster` that keeps its notes with ours."""
        other = Witness(cluster)
        other.used, other.refused = self.used, self.refused
        return other

    async def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return await self._call(self._cluster.read(kind, namespace, name), kind, "get")

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str = ""
    ) -> AsyncIterator[list[dict[str, Any]]]:
        self.used.add(("list", kind.group, kind.plural))
        async for page in self._cluster.list(kind, namespace, selector=selector):
            yield page

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call(self._cluster.create(kind, namespace, body), kind, "create")

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply needs `patch`, and `create` where the object may be new."""
        return await self._call(self._cluster.apply(kind, namespace, name, body), kind, "create", "patch")

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str | None = None
    ) -> dict[str, Any]:
        call = self._cluster.patch(kind, namespace, name, body, subresource=subresource)
        return await self._call(call, kind, "patch", subresource=subresource)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call(self._cluster.replace(kind, namespace, name, body), kind, "update")

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> dict[str, Any]:
        return await self._call(
            self._cluster.delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds), kind, "delete"
        )

    async def _call(self, call: Any, kind: Kind, *verbs: str, subresource: str | None = None) -> dict[str, Any]:
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        self.used |= {(verb, kind.group, resource) for verb in verbs}
        try:
            return await call
        except Forbidden as error:
            self.refused.append(error.message)
            raise
