"""The job's Secret: CURVE keys and control token, a pure function of (master key, job uid), so that it comes back byte-equal."""

from __future__ import annotations

import base64
from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan import keys
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import Object

SERVED = {"runner": ("runner", "channel", "actor"), "actor": ("actor",), "rollout": ("rollout",), "env": ("env",)}
"""Whose secret halves a pod holds: `runner` stands for actor-0."""


def build(job: RLJob | Object, *, master: bytes) -> dict[str, Any]:
    """Return the Secret. Immutable: nobody can swap a key under running pods."""
    name, _, uid = meta.identity(job)
    data = {file: base64.b64encode(text.encode()).decode() for file, text in keys.key_files(master, uid).items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta.metadata(job, naming.secret(name, uid), component="keys"),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def files_of(roles: tuple[str, ...], *, runner: bool) -> tuple[list[str], list[str]]:
    """Return (secret files, public files) that a pod with processes of `roles` sees; `runner`: it is actor-0."""
    held = sorted({owner for role in roles for owner in SERVED["runner" if runner and role == "actor" else role]})
    private = [f"{role}.secret" for role in held] + ([keys.TOKEN_FILE] if runner else [])
    return private, [f"{role}.public" for role in keys.KEY_ROLES]
