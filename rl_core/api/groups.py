"""`spec.groups`: the groups of worker processes that a job has besides actor, rollout and env."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_core.api.base import rule
from rl_core.api.bounds import FUNCTION, Pattern
from rl_core.api.cel import Cel, literal
from rl_core.api.identity import ROLES
from rl_core.api.roles import RoleSpec

MOST_GROUPS = 16
"""Most groups that a job declares."""
RESERVED_NAMES = (*ROLES, "runner", "channel", "supervisor", "hub", "weights", "control")
"""Names that a job gives to its own groups, processes and services."""
GroupName = Annotated[
    str,
    Field(max_length=15),
    Pattern(
        regex=r"[a-z]([-a-z0-9]*[a-z0-9])?",
        rule="a DNS-1123 label of at most 15 characters (a-z, 0-9, -; a letter first)",
        way_out="rename it",
    ),
]
"""Name of a group. Pod names are made of the job's, the group's and an index, and must fit in 63 characters."""
ClassPath = Annotated[
    str,
    Field(max_length=253),
    Pattern(regex=FUNCTION, rule="module:Class", way_out="name a class that can be imported"),
]
"""A class of the user, `package.module:Class`."""


class GroupSpec(RoleSpec):
    """A group of equal worker processes. The fields of a pod are those of the other roles."""

    name: GroupName
    """Name of the group; its pods are <job>-<name>-<index>."""
    worker: ClassPath
    """Class of the worker processes, module:Class, a subclass of rl_core.workers.worker.Worker. It is constructed with `config`."""
    replicas: int = Field(1, ge=1, le=1024)
    """Number of pods."""
    processes_per_pod: int = Field(1, ge=1, le=64)
    """Worker processes per pod."""
    lifecycle: Literal["gang", "elastic"] = "elastic"
    """gang: all pods restart together with the actors when one fails. elastic: each pod is replaced alone, and replicas may change."""
    callers: Annotated[list[GroupName], Field(max_length=19)] = []
    """Groups whose processes may call the methods of this one; the program always may."""
    config: Annotated[dict[str, Any], Field(max_length=64)] = {}
    """Argument of the worker class."""

    @rule(
        Cel(
            holds=f"!(self.name in {literal(list(RESERVED_NAMES))})",
            refusal=f"name must not be one of {', '.join(RESERVED_NAMES)}, got %s; rename the group",
            values=("self.name",),
            field="name",
        )
    )
    def _name_is_free(self) -> Iterator[str]:
        if self.name in RESERVED_NAMES:
            yield f"name must not be one of {', '.join(RESERVED_NAMES)}, got {self.name}; rename the group"

    @rule(
        Cel(
            holds="self.?gpus.orValue(0) % $processesPerPod == 0",
            refusal="gpus must be a multiple of processesPerPod %d, got %d; change one of them",
            values=("$processesPerPod", "self.?gpus.orValue(0)"),
            field="gpus",
        )
    )
    def _gpus_divide(self) -> Iterator[str]:
        if self.gpus % self.processes_per_pod:
            yield f"gpus must be a multiple of processesPerPod {self.processes_per_pod}, got {self.gpus}; change one of them"
