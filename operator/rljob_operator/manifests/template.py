"""The hash of the settings from which a pod is made, kept in an annotation of the pod."""

from __future__ import annotations

from rl_core.api.job import RLJob
from rl_core.plan.groups import Group
from rljob_operator.manifests import meta
from rljob_operator.manifests.containers import image_of
from rljob_operator.model import OperatorConfig

NOT_COVERED = {"replicas", "min_replicas", "max_replicas"}
"""Settings of the number of pods, which do not change a pod."""
TAKEN_LIVE = {"optimizer": {"learning_rate"}}
"""Settings that a running job takes over without a restart."""


def template_hash(job: RLJob, group: Group, *, config: OperatorConfig) -> str:
    """Return the hash of image, resources and settings of a group; not of epoch, world size, replicas or operator version.

    A difference alone never replaces a pod: it takes effect at the next restart.
    """
    excluded: dict[str, bool | set[str]] = dict.fromkeys(NOT_COVERED, True)
    settings = group.spec.model_dump(mode="json", by_alias=True, exclude={**excluded, **TAKEN_LIVE})
    code = job.spec.code.config_map if job.spec.code is not None else None
    return meta.digest(
        {"role": group.name, "settings": settings, "image": image_of(group, config=config), "code": code}
    )
