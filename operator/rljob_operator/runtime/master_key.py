"""The master keys of the operator: 32 random bytes from which the keys of every job are derived, and earlier keys.

The Secret is read at start, and created if it is absent. Two replicas that start at the same time agree, because the second create fails
with 409 and the Secret is read instead. A lost key is never replaced while jobs have keys: the Secrets of the jobs cannot be changed, so no
runner would accept a call that is signed with another key.

A job keeps the key that it was accepted with (`status.keyId`). The key for new jobs can be changed while jobs run, as long as the Secret
has both keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.api.job import MANAGER
from rljob_operator import kinds
from rljob_operator.errors import AlreadyExists, ApiError, NotFound
from rljob_operator.model import Object
from rljob_operator.runtime.cluster import Cluster

NAME = "rljob-operator-master-key"
FIELD = "master"
"""Name of the Secret's entry with the key for new jobs. Every other entry is an earlier key."""
BYTES = 32
ENDED = ("Succeeded", "Failed")


class MasterKeyError(RuntimeError):
    """The Secret contains no valid key, or it is missing although jobs have keys derived from it."""


class UnknownKey(ApiError):
    """The keys of a job were derived from a master key that is not in the Secret."""


class KeyRing:
    """The master keys by id."""

    def __init__(self, newest: bytes, earlier: Iterable[bytes] = ()) -> None:
        self.newest = key_id(newest)
        """Id of the key of jobs that have none yet."""
        self._keys = {key_id(key): key for key in (*earlier, newest)}

    def of(self, job: Object | None) -> bytes:
        """Return the master key of a job; the key for new jobs if the job has none yet or is None. Raises UnknownKey."""
        status = job.get("status") if job is not None else None
        requested = status.get("keyId") if isinstance(status, Mapping) else None
        key = self._keys.get(requested or self.newest)
        if key is None:
            raise UnknownKey(
                f"the job's keys were made from master key {requested}, which Secret {NAME} does not hold; "
                "put that key back, or make the job anew"
            )
        return key


def key_id(key: bytes) -> str:
    """Return the id of a master key, 8 hexadecimal digits that do not reveal the key."""
    return hashlib.sha256(key).hexdigest()[:8]


async def obtain(cluster: Cluster, *, namespace: str, jobs: Iterable[Object] = ()) -> KeyRing:
    """Return the master keys from the Secret, which is created if it is absent and no job has keys.

    `jobs` are all jobs that are served. Raises MasterKeyError if an entry of the Secret is not 32 bytes long, or if there is no Secret and
    a job has keys already.
    """
    try:
        secret = await cluster.read(kinds.SECRET, namespace, NAME)
    except NotFound:
        if keyed := sorted(map(_name, filter(_has_keys, jobs))):
            raise MasterKeyError(
                f"Secret {namespace}/{NAME} must be there, as {len(keyed)} jobs have keys made from it ({keyed[0]}, ...), got none; "
                "restore it from a backup, or see docs/install.md, The master key"
            ) from None
        try:
            secret = await cluster.create(kinds.SECRET, namespace, _secret(os.urandom(BYTES)))
        except AlreadyExists:
            secret = await cluster.read(kinds.SECRET, namespace, NAME)
    data = secret.get("data")
    entries = data if isinstance(data, dict) else {}
    newest = _decoded(entries, FIELD, namespace)
    return KeyRing(newest, [_decoded(entries, name, namespace) for name in sorted(entries) if name != FIELD])


def _has_keys(job: Object) -> bool:
    """Return whether a job was started and has not ended; its Secret exists then."""
    status, manager = job.get("status"), (job.get("spec") or {}).get("managedBy")
    if manager not in (None, MANAGER):
        return False
    return isinstance(status, Mapping) and bool(status.get("epoch")) and status.get("phase") not in ENDED


def _name(job: Object) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def _secret(key: bytes) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/managed-by": "rljob-operator"}},
        "type": "Opaque",
        "immutable": True,
        "data": {FIELD: base64.b64encode(key).decode()},
    }


def _decoded(entries: dict[str, Any], name: str, namespace: str) -> bytes:
    try:
        key = base64.b64decode(entries.get(name, ""), validate=True)
    except (binascii.Error, TypeError):
        key = b""
    if len(key) != BYTES:
        raise MasterKeyError(
            f"Secret {namespace}/{NAME}: data.{name} must be {BYTES} bytes in base64, got {len(key)}; "
            "restore it from a backup, or see docs/install.md, The master key"
        )
    return key
