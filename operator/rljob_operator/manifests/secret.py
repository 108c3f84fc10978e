"""The Secret of a job:

CURVE keys and control token. A pure function of (master key, job uid), so a deleted Secret is recreated unchanged.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan import keys
from rl_core.plan.groups import group_blocks, groups_of
from rl_core.plan.launch import PodPlan
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import Object


def build(job: RLJob | Object, *, master: bytes, groups: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the Secret of a job, with a key pair for each of `groups` (None: those of the job).

    It is immutable, so that nobody changes the keys of running pods.
    """
    name, _, uid = meta.identity(job)
    if groups is None:
        groups = groups_of(job.spec) if isinstance(job, RLJob) else group_blocks(job.get("spec"))
    data = {
        file: base64.b64encode(text.encode()).decode() for file, text in keys.key_files(master, uid, groups).items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta.metadata(job, naming.secret(name, uid), component="keys"),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def files_of(pod: PodPlan, groups: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (secret files, public files) of a pod: the secret keys of its own processes and, beside the runner, the control token."""
    roles = {process.env["RLJOB_ROLE"] for container in pod.containers for process in container.processes}
    token = [keys.TOKEN_FILE] if "runner" in roles else []
    return [f"{role}.secret" for role in sorted(roles)] + token, [f"{role}.public" for role in keys.key_names(groups)]
