"""The operator's one secret: 32 random bytes from which every job's keys are derived (protocol.md 6).

Read, or made when absent; two replicas that start at once agree, since the second to create meets 409 and reads. Never replaced: with
another master the keys of running jobs could not be made again.
"""

from __future__ import annotations

import base64
import binascii
import os

from rljob_operator import kinds
from rljob_operator.errors import AlreadyExists, NotFound
from rljob_operator.runtime.cluster import Cluster

NAME = "rljob-operator-master-key"
FIELD = "master"
BYTES = 32


class MasterKeyError(RuntimeError):
    """The Secret is there and holds no key of ours."""


async def obtain(cluster: Cluster, *, namespace: str) -> bytes:
    """Return the master key, made on first use; raises MasterKeyError when the Secret's content is not 32 bytes."""
    try:
        secret = await cluster.read(kinds.SECRET, namespace, NAME)
    except NotFound:
        try:
            secret = await cluster.create(kinds.SECRET, namespace, _secret(os.urandom(BYTES)))
        except AlreadyExists:
            secret = await cluster.read(kinds.SECRET, namespace, NAME)
    return _decoded(secret, namespace)


def _secret(key: bytes) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/managed-by": "rljob-operator"}},
        "type": "Opaque",
        "immutable": True,
        "data": {FIELD: base64.b64encode(key).decode()},
    }


def _decoded(secret: dict[str, object], namespace: str) -> bytes:
    data = secret.get("data")
    text = data.get(FIELD, "") if isinstance(data, dict) else ""
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != BYTES:
        raise MasterKeyError(
            f"Secret {namespace}/{NAME}: data.{FIELD} must be {BYTES} bytes in base64, got {len(key)}; "
            "restore it from a backup, or delete the Secret when no job runs"
        )
    return key
