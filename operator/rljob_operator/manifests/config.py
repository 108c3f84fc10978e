"""The ConfigMap of a job: the resolved job, and the schema defaults with which it was resolved.

A starting actor pod reads the resolved job; all other pods get it from the runner. A later release of the operator reads the defaults.

The manifest hash covers the fields that the user wrote and the version of the defaults, not the resolved document. An operator whose schema
has an additional field or another default therefore leaves the ConfigMap of a running job unchanged.
"""

from __future__ import annotations

from typing import Any

from rl_core.api import document
from rl_core.api.defaults import Defaults, short
from rl_core.api.job import RLJob
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

KEY = "job.json"
DEFAULTS_KEY = "defaults.json"


def build(job: RLJob, *, defaults: Defaults, config: OperatorConfig) -> dict[str, Any]:
    """Return the ConfigMap of a job that was resolved with `defaults`."""
    name, _, uid = meta.identity(job)
    data = {"data": {KEY: meta.canonical(resolved(job, defaults)), DEFAULTS_KEY: defaults.text}}
    return meta.support(
        job,
        "ConfigMap",
        naming.config_map(name),
        data,
        api_version="v1",
        component="config",
        config=config,
        hashed={"uid": uid, "schema": defaults.version, "spec": short(job.spec, defaults.table)},
    )


def resolved(job: RLJob, defaults: Defaults) -> dict[str, Any]:
    """Return the job with all defaults and its identity, without labels and annotations, which may change independently of the job."""
    name, namespace, uid = meta.identity(job)
    identity = {"name": name, "namespace": namespace, "uid": uid}
    fields = document.write(job, defaults.table)
    return {**fields, "metadata": identity, document.CHANGED: {**fields[document.CHANGED], "metadata": identity}}
