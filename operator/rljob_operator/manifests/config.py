"""The ConfigMap with the resolved job: what a starting actor pod reads. All others get the job from the runner."""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

KEY = "job.json"


def build(job: RLJob, *, config: OperatorConfig) -> dict[str, Any]:
    """Return the ConfigMap."""
    name, _, _ = meta.identity(job)
    data = {"data": {KEY: meta.canonical(resolved(job))}}
    return meta.support(
        job, "ConfigMap", naming.config_map(name), data, api_version="v1", component="config", config=config
    )


def resolved(job: RLJob) -> dict[str, Any]:
    """Return the job with every default and its identity; without labels and annotations, which change for others' reasons."""
    name, namespace, uid = meta.identity(job)
    whole = job.model_dump(mode="json", by_alias=True)
    return {**whole, "metadata": {"name": name, "namespace": namespace, "uid": uid}}
