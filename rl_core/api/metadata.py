"""`metadata` of a job: its name and what Kubernetes adds."""

import re

from pydantic import field_validator

from rl_core.api.base import Spec

NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
NAME_REFUSAL = (
    "name must be a DNS-1123 label of at most 40 characters (a-z, 0-9, -; a letter first), got %s; rename the job"
)
"""Pod names are made of the job's and must fit in 63 characters."""


class Metadata(Spec):
    """Object metadata; on a cluster the API server adds more, which is ignored here."""

    model_config = Spec.model_config | {"extra": "ignore", "str_max_length": None}

    name: str
    """DNS-1123 label of at most 40 characters, so that pod names fit."""
    namespace: str | None = None
    """Namespace; local mode uses "default"."""
    uid: str | None = None
    """Unique id given by the API server; local mode makes one."""
    labels: dict[str, str] = {}
    """Labels."""
    annotations: dict[str, str] = {}
    """Annotations."""

    @field_validator("name")
    @classmethod
    def _dns_label(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(NAME_REFUSAL % name)
        return name
