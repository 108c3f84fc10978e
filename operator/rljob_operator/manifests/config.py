"""The ConfigMap with the resolved job, which a starting actor pod reads (all others get the job from the runner), and with the defaults
it was resolved by, which a later operator reads.

Its manifest hash covers what its author wrote and the version of those defaults, not the words of the document: an operator whose
schema has a field more, or another default, finds the ConfigMap as it should be and leaves a running job as it was accepted.
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
    """Return the ConfigMap of a job that was resolved by `defaults`."""
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
    """Return the job with every default and its identity; without labels and annotations, which change for others' reasons."""
    name, namespace, uid = meta.identity(job)
    identity = {"name": name, "namespace": namespace, "uid": uid}
    whole = document.write(job, defaults.table)
    return {**whole, "metadata": identity, document.CHANGED: {**whole[document.CHANGED], "metadata": identity}}
