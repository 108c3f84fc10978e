"""The job's Secret: CURVE keys and control token, a pure function of (master key, job uid), so that it comes back byte-equal."""

from __future__ import annotations

import base64
from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan import keys
from rl_core.plan.launch import PodPlan
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import Object


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


def files_of(pod: PodPlan) -> tuple[list[str], list[str]]:
    """Return (secret files, public files) that a pod sees: the secret halves of its own processes' roles, the token beside the runner."""
    roles = {process.env["RLJOB_ROLE"] for container in pod.containers for process in container.processes}
    token = [keys.TOKEN_FILE] if "runner" in roles else []
    return [f"{role}.secret" for role in sorted(roles)] + token, [f"{role}.public" for role in keys.key_names()]
