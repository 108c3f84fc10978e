"""Whether a pod is as it would be made today."""

from __future__ import annotations

from rl_core.api.job import RLJob
from rljob_operator.manifests import meta
from rljob_operator.manifests.containers import image_of
from rljob_operator.model import OperatorConfig

NOT_COVERED = {"replicas", "min_replicas", "max_replicas"}
"""Settings that say how many pods there are, not what they are like."""
TAKEN_LIVE = {"optimizer": {"learning_rate"}}
"""Settings that the runner takes while it runs."""


def template_hash(job: RLJob, role: str, *, config: OperatorConfig) -> str:
    """Return the hash of image, resources and settings of a role; not of epoch, world size, replicas or operator version.

    A difference alone never replaces a pod: it takes effect at the next restart.
    """
    spec = getattr(job.spec, role)
    left_out: dict[str, bool | set[str]] = dict.fromkeys(NOT_COVERED, True)
    settings = spec.model_dump(mode="json", by_alias=True, exclude={**left_out, **TAKEN_LIVE})
    code = job.spec.code.config_map if job.spec.code is not None else None
    return meta.digest({"role": role, "settings": settings, "image": image_of(job, role, config=config), "code": code})
