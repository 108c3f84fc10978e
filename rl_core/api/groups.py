"""`spec.groups`: the groups of worker processes that a job has besides actor, rollout and env."""

from collections.abc import Iterator, Sequence
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


PULLS = "has(self.groups) && self.groups.exists(g, g.name == self.algorithm.inference && has(g.weights) && g.weights == 'pulls')"
"""CEL of whether the group `algorithm.inference` holds the policy."""
INFERENCE_HOLDS_THE_POLICY = Cel(
    holds=f"!self.?algorithm.?inference.hasValue() || ({PULLS})",
    refusal="algorithm.inference must name a group of spec.groups with weights: pulls, got %s; declare it",
    values=("self.algorithm.inference",),
    field="algorithm.inference",
)
WEIGHTS_ARE_WHOLE = Cel(
    holds="!has(self.groups) || !self.?model.?lora.hasValue() || !self.groups.exists(g, has(g.weights) && g.weights == 'pulls')",
    refusal="groups cannot pull the weights of a model with model.lora; remove one of them",
    field="groups",
)


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
    weights: Literal["none", "pulls"] = "none"
    """pulls: the processes hold the policy and get each version of its weights; worker is a rl_core.groups.policy.PolicyWorker."""
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
            holds="$weights == 'none' || $lifecycle == 'elastic'",
            refusal="weights pulls needs lifecycle elastic, got gang; remove one",
            field="weights",
        )
    )
    def _pulls_one_by_one(self) -> Iterator[str]:
        if self.weights == "pulls" and self.lifecycle == "gang":
            yield "weights pulls needs lifecycle elastic, got gang; remove one"

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


def wrong_pulls(groups: Sequence[GroupSpec], *, inference: str | None, lora: bool) -> Iterator[str]:
    """Yield the problems of a job with groups that pull weights. `inference` names the one that computes old log-probabilities."""
    pulling = [group.name for group in groups if group.weights == "pulls"]
    if inference is not None and inference not in pulling:
        yield f"algorithm.inference must name a group of spec.groups with weights: pulls, got {inference}; declare it"
    if pulling and lora:
        yield "groups cannot pull the weights of a model with model.lora; remove one of them"
