"""An API server in memory behind the `Cluster` port."""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rljob_operator.errors import AlreadyExists, ApiError, Conflict, NotFound
from rljob_operator.kinds import Kind


class FakeCluster:
    """An API server in memory: names, uids, resource versions, preconditions. `fail` makes the next calls raise."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.scaled: list[tuple[str, int]] = []
        """(name, replicas) of writes to the scale subresource."""
        self._failures: dict[tuple[str, str], list[ApiError]] = {}
        self._numbers = itertools.count(1)

    def fail(self, verb: str, name: str, *errors: ApiError) -> None:
        """Have the next calls of a verb on an object of that name raise the errors, one each."""
        self._failures.setdefault((verb, name), []).extend(errors)

    def put(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Place an object as somebody else would."""
        obj = copy.deepcopy(dict(body))
        obj.setdefault("apiVersion", kind.api_version)
        obj.setdefault("kind", kind.kind)
        meta = obj.setdefault("metadata", {})
        meta.setdefault("namespace", namespace)
        meta.setdefault("uid", f"uid-{next(self._numbers)}")
        meta["resourceVersion"] = str(next(self._numbers))
        self.objects[kind.kind, namespace, meta["name"]] = obj
        return copy.deepcopy(obj)

    def of(self, kind: Kind) -> list[str]:
        """Return the names of all objects of a kind."""
        return sorted(name for owner, _, name in self.objects if owner == kind.kind)

    async def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        self._called("read", kind, name)
        return copy.deepcopy(self._get(kind, namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str = ""
    ) -> AsyncIterator[list[dict[str, Any]]]:
        self._called("list", kind, "")
        key, _, value = selector.partition("=")
        found = [
            obj for (owner, place, _), obj in self.objects.items() if owner == kind.kind and namespace in (None, place)
        ]
        if selector:
            found = [
                o for o in found if key in (labels := o["metadata"].get("labels") or {}) and value in ("", labels[key])
            ]
        yield copy.deepcopy(found)

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        self._called("create", kind, name)
        if (kind.kind, namespace, name) in self.objects:
            raise AlreadyExists(f'{kind.plural} "{name}" already exists')
        return self.put(kind, namespace, body)

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._called("apply", kind, name)
        known = self.objects.get((kind.kind, namespace, name))
        return self.put(
            kind, namespace, {**body, "metadata": {**(known or {}).get("metadata", {}), **body["metadata"]}}
        )

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str | None = None
    ) -> dict[str, Any]:
        self._called("patch", kind, name)
        known = self._get(kind, namespace, name)
        wanted = body.get("metadata", {})
        if any(known["metadata"][field] != wanted[field] for field in ("resourceVersion", "uid") if field in wanted):
            raise Conflict("the object has been modified")
        if subresource == "scale":
            self.scaled.append((name, body["spec"]["replicas"]))
            return {"kind": "Scale", "spec": body["spec"]}
        merged = merge_patch(known, {field: value for field, value in body.items() if field != "metadata"})
        return self.put(kind, namespace, merged)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._called("replace", kind, name)
        known = self._get(kind, namespace, name)
        if body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        return self.put(kind, namespace, body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> dict[str, Any]:
        self._called("delete", kind, name)
        known = self._get(kind, namespace, name)
        if known["metadata"]["uid"] != uid:
            raise Conflict("the UID in the precondition does not match")
        gone = self.objects.pop((kind.kind, namespace, name))
        return {**gone, "metadata": {**gone["metadata"], "deletionGracePeriodSeconds": 0}}

    def _get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        try:
            return self.objects[kind.kind, namespace, name]
        except KeyError as error:
            raise NotFound(f'{kind.plural} "{name}" not found') from error

    def _called(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.kind, name))
        if errors := self._failures.get((verb, name)):
            raise errors.pop(0)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2, word by word."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result
