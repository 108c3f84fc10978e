"""Metadata of generated objects, and the conversion of schema objects to API objects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rl_core.api.job import API_VERSION, RLJob
from rljob_operator import naming
from rljob_operator.model import Object, OperatorConfig

_NOT_A_LABEL = re.compile(r"[^A-Za-z0-9._-]+")


def identity(job: RLJob | Object) -> tuple[str, str, str]:
    """Return (name, namespace, uid) of a job from the API server, typed or raw."""
    if isinstance(job, RLJob):
        name, namespace, uid = job.metadata.name, job.metadata.namespace, job.metadata.uid
    else:
        name, namespace, uid = (job["metadata"].get(key) for key in ("name", "namespace", "uid"))
    if not namespace or not uid:
        raise ValueError(
            f"a job from the API server must have namespace and uid, got {namespace!r} and {uid!r}; this is a bug"
        )
    return name, namespace, uid


def labels(job: RLJob | Object, *, component: str, version: str | None = None) -> dict[str, str]:
    """Return the labels of an object of the job; `version` is the operator's."""
    name, _, uid = identity(job)
    result = {
        naming.LABEL_NAME: naming.APP,
        naming.LABEL_INSTANCE: name,
        naming.LABEL_COMPONENT: component,
        naming.LABEL_MANAGED_BY: naming.FIELD_MANAGER,
        **naming.job_labels(name, uid),
    }
    if version is not None:
        result[naming.LABEL_VERSION] = _NOT_A_LABEL.sub("_", version)[:63].strip("._-")
    return result


def owner(job: RLJob | Object) -> dict[str, Any]:
    """Return the owner reference by which the garbage collector deletes an object together with its job.

    With blockOwnerDeletion, a job that is deleted in the foreground disappears only after its pods. This needs the permission to update
    `rljobs/finalizers`.
    """
    name, _, uid = identity(job)
    return {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata(job: RLJob | Object, name: str, *, component: str, version: str | None = None) -> dict[str, Any]:
    """Return the metadata of an object of the job."""
    return {
        "name": name,
        "namespace": identity(job)[1],
        "labels": labels(job, component=component, version=version),
        "ownerReferences": [owner(job)],
    }


def support(
    job: RLJob,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    *,
    api_version: str,
    component: str,
    config: OperatorConfig,
    hashed: Any = None,
) -> dict[str, Any]:
    """Return an object for server-side apply, with the manifest hash that decides whether it must be sent.

    `hashed` is the value to hash. None means the object without the operator's version, so that an upgrade alone writes nothing.
    """
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata(job, name, component=component), **body}
    meta = metadata(job, name, component=component, version=config.version)
    meta["annotations"] = {naming.ANNOTATION_MANIFEST_HASH: digest(manifest if hashed is None else hashed)}
    return {**manifest, "metadata": meta}


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """Return `value` as JSON with sorted keys and no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def api(part: BaseModel) -> dict[str, Any]:
    """Return a schema object for the API server: camelCase keys, without fields that were not set."""
    fields: dict[str, Any] = _trimmed(part.model_dump(mode="json", by_alias=True, exclude_none=True))
    return fields


def _trimmed(value: Any) -> Any:
    """Remove empty lists and maps inside maps.

    A map that becomes empty by that stays, because `{}` can have a meaning (a selector of everything).
    """
    if isinstance(value, dict):
        return {key: _trimmed(item) for key, item in value.items() if item not in ([], {})}
    return [_trimmed(item) for item in value] if isinstance(value, list) else value
