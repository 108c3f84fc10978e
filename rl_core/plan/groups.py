"""The groups of worker processes of a job, as data.

A group is a set of equal worker processes that run in pods of their own kind. Launch plan, keys, call rights, capacity, failure rules and
the command line iterate over the groups of a job, so that a new group is an entry in `groups_of`. The names of the three groups of the
built-in programs are `ACTOR`, `ROLLOUT` and `ENV`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from rl_core.api.backends import EMBODIED_PROGRAMS, ENGINES, TRAINERS
from rl_core.api.errors import ConfigError
from rl_core.api.identity import ROLES

if TYPE_CHECKING:
    from rl_core.api.groups import GroupSpec
    from rl_core.api.job import RLJobSpec
    from rl_core.api.roles import RoleSpec

ACTOR, ROLLOUT, ENV = ROLES
CONTROL_GROUP = ACTOR
"""The group whose pod 0 also runs the runner and the channel server."""
KINDS_VARIABLE = "RLJOB_GROUPS"
"""Environment variable that tells processes of the groups of their job besides the built-in ones, as JSON."""
SCRIPT_WORKERS = "script-worker-processes"
"""Role of the worker processes of a script, which have one key for all groups. Too long for the name of a group of a job."""
TRAJECTORIES, VALIDATION = "trajectories", "validation"
"""Channels of the built-in programs: groups of samples to train on, and results of a measurement."""


class Lifecycle(StrEnum):
    """What happens to a worker group when one of its members fails: GANG or ELASTIC."""

    GANG = "gang"
    """The number of members is fixed, and all of them restart together under a new epoch (the number of gang restarts of the job)."""
    ELASTIC = "elastic"
    """Each member is replaced alone; the number of members may change while the job runs."""


class WeightSource(StrEnum):
    """Where the members of a worker group get the weights of the policy: see the members of this enum."""

    NONE = "none"
    PULLS = "pulls"
    """A member loads the committed version, and proves that it did, before it gets work."""


class ChannelUse(StrEnum):
    """What a process does with a channel."""

    PUT = "put"
    TAKE = "take"
    PRODUCE = "produce"
    """Register as a producer, whose end the channel waits for before it reports that no more items will come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupKind:
    """The properties of a worker group that do not depend on the job.

    These are its lifecycle, the source of its weights, and its rights to call other groups and to use channels.
    """

    name: str
    lifecycle: Lifecycle = Lifecycle.ELASTIC
    weights: WeightSource = WeightSource.NONE
    callers: frozenset[str] = frozenset()
    """Groups whose key may call the RPC methods of the members. The runner always may."""
    channels: Mapping[str, frozenset[ChannelUse]] = field(default_factory=dict)
    """Uses of each channel that the key of the group permits. A channel that no group names is open to all groups."""

    @property
    def elastic(self) -> bool:
        """Return whether members come and go one by one while the job runs."""
        return self.lifecycle is Lifecycle.ELASTIC

    @property
    def stall_reason(self) -> str:
        """Return the reason of a stall in which the job waits for this group, such as WaitingForRollout."""
        return "WaitingFor" + "".join(word.capitalize() for word in self.name.split("-"))

    @property
    def holds_model(self) -> bool:
        """Return whether the members hold the model: they train it, or pull its weights."""
        return self.pulls_weights or not self.elastic

    @property
    def pulls_weights(self) -> bool:
        """Return whether the members load the weights of the trainer."""
        return self.weights is WeightSource.PULLS


@dataclass(frozen=True, kw_only=True, slots=True)
class Group(GroupKind):
    """One group of a job: its kind, its worker class and its pods."""

    worker: str
    """Class of the worker processes, `module:Class`."""
    spec: RoleSpec
    """The fields of its pods."""
    replicas: int
    """Pods that the job asks for."""
    processes_per_pod: int = 1
    """Worker processes in each pod."""
    min_replicas: int = 0
    """Replicas without which the job waits, for an elastic group; a gang always needs all of them."""
    config: Mapping[str, Any] | None = None
    """Argument of the worker class; None: the program knows its arguments."""
    endpoint_callers: frozenset[str] = frozenset()
    """Groups whose agent programs call the OpenAI endpoint of the members. Members have an endpoint only where a group is named here."""

    @classmethod
    def of_kind(
        cls,
        kind: GroupKind,
        *,
        worker: str,
        spec: RoleSpec,
        replicas: int,
        processes_per_pod: int = 1,
        min_replicas: int = 0,
        config: Mapping[str, Any] | None = None,
        endpoint_callers: frozenset[str] = frozenset(),
    ) -> Self:
        """Return a group of the given kind."""
        traits = {trait.name: getattr(kind, trait.name) for trait in fields(GroupKind)}
        return cls(
            **traits,
            worker=worker,
            spec=spec,
            replicas=replicas,
            processes_per_pod=processes_per_pod,
            min_replicas=min_replicas,
            config=config,
            endpoint_callers=endpoint_callers,
        )

    @property
    def world_size(self) -> int:
        """Number of worker processes in all pods together."""
        return self.replicas * self.processes_per_pod

    @property
    def min_members(self) -> int:
        """Number of worker processes of which `min_replicas` pods have at least one each, however they are distributed."""
        return (self.min_replicas - 1) * self.processes_per_pod + 1 if self.min_replicas else 0


BUILT_IN: Mapping[str, GroupKind] = MappingProxyType(
    {
        ACTOR: GroupKind(
            name=ACTOR,
            lifecycle=Lifecycle.GANG,
            callers=frozenset({ROLLOUT}),
            channels={TRAJECTORIES: frozenset(ChannelUse)},
        ),
        ROLLOUT: GroupKind(
            name=ROLLOUT,
            weights=WeightSource.PULLS,
            callers=frozenset({ACTOR}),
            channels={TRAJECTORIES: frozenset({ChannelUse.PUT}), VALIDATION: frozenset({ChannelUse.PUT})},
        ),
        ENV: GroupKind(name=ENV, callers=frozenset({ROLLOUT})),
    }
)
"""The groups that every job has, for code that runs before it knows the job."""


EMBODIED_WORKERS: Mapping[str, str] = MappingProxyType(
    {
        ACTOR: "rl_core.actors.embodied:EmbodiedFSDPActor",
        ROLLOUT: "rl_core.rollouts.multi_step:MultiStepRolloutWorker",
        ENV: "rl_core.envs.vector_worker:EnvWorker",
    }
)
"""Worker classes of the embodied programs."""


def groups_of(spec: RLJobSpec) -> dict[str, Group]:
    """Return the groups of a job by name, in the order in which their pods are planned."""
    actor, rollout, env = spec.actor, spec.rollout, spec.env
    embodied = spec.program in EMBODIED_PROGRAMS
    groups = (
        Group.of_kind(
            BUILT_IN[ACTOR],
            worker=EMBODIED_WORKERS[ACTOR] if embodied else TRAINERS[actor.backend],
            spec=actor,
            replicas=actor.replicas,
            processes_per_pod=actor.processes,
        ),
        Group.of_kind(
            BUILT_IN[ROLLOUT],
            worker=EMBODIED_WORKERS[ROLLOUT] if embodied else ENGINES[rollout.engine],
            spec=rollout,
            replicas=rollout.replicas,
            processes_per_pod=1 if embodied else rollout.engines,
            min_replicas=rollout.min_replicas,
            endpoint_callers=frozenset({ENV}) if env.calls_model else frozenset(),
        ),
        Group.of_kind(
            BUILT_IN[ENV],
            worker=EMBODIED_WORKERS[ENV] if embodied else "rl_core.envs.worker:TextEnvWorker",
            spec=env,
            replicas=env.replicas,
        ),
        *map(_declared, spec.groups),
    )
    return {group.name: group for group in groups}


def elastic_block(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the block of an elastic group in `spec` as it was written, to set its replicas.

    Raises ConfigError for a group that the job does not have, and for a gang, whose size is fixed.
    """
    gang = Lifecycle.GANG.value
    blocks = group_blocks(spec)
    gangs = {group for group, block in blocks.items() if block.get("lifecycle") == gang}
    gangs |= {group for group, kind in BUILT_IN.items() if not kind.elastic}
    if name not in blocks.keys() - gangs:
        elastic = ", ".join(group for group in blocks if group not in gangs)
        raise ConfigError(
            f"group must be one of the elastic groups of the job ({elastic}), got {name}; name one of them"
        )
    return blocks[name]


def group_blocks(spec: Any) -> dict[str, dict[str, Any]]:
    """Return the block of each group by name in `spec`, a job as it was written, before validation. Malformed blocks are left out."""
    job_fields = spec if isinstance(spec, Mapping) else {}
    declared = job_fields.get("groups")
    blocks = {name: job_fields.get(name) or {} for name in BUILT_IN}
    for block in declared if isinstance(declared, list) else []:
        if isinstance(block, dict) and isinstance(block.get("name"), str):
            blocks.setdefault(block["name"], block)
    return {name: block for name, block in blocks.items() if isinstance(block, dict)}


def _declared(group: GroupSpec) -> Group:
    """Return a group of `spec.groups`. The actor sends the weights to a group that pulls them, so it may call it."""
    weights = WeightSource(group.weights)
    senders = {ACTOR} if weights is WeightSource.PULLS else set()
    return Group.of_kind(
        GroupKind(
            name=group.name,
            lifecycle=Lifecycle(group.lifecycle),
            weights=weights,
            callers=frozenset(group.callers) | senders,
        ),
        worker=group.worker,
        spec=group,
        replicas=group.replicas,
        processes_per_pod=group.processes_per_pod,
        config=group.config,
    )


def kinds_as_variable(groups: Mapping[str, GroupKind]) -> str:
    """Return the value of KINDS_VARIABLE for a job with `groups`, empty when it has the built-in ones only."""
    kinds = [
        {
            "name": group.name,
            "lifecycle": group.lifecycle.value,
            "weights": group.weights.value,
            "callers": sorted(group.callers),
            "channels": {name: sorted(uses) for name, uses in sorted(group.channels.items())},
        }
        for group in groups.values()
        if group.name not in BUILT_IN
    ]
    return json.dumps(kinds, separators=(",", ":")) if kinds else ""


def kinds_of_environment(environ: Mapping[str, str] | None = None) -> Mapping[str, GroupKind]:
    """Return the groups of the job from the environment variables `environ` (None: those of this process).

    Used by processes that do not have the job.
    """
    kinds = json.loads((os.environ if environ is None else environ).get(KINDS_VARIABLE) or "[]")
    declared = [
        GroupKind(
            name=kind["name"],
            lifecycle=Lifecycle(kind["lifecycle"]),
            weights=WeightSource(kind["weights"]),
            callers=frozenset(kind["callers"]),
            channels={name: frozenset(map(ChannelUse, uses)) for name, uses in kind["channels"].items()},
        )
        for kind in kinds
    ]
    return {**BUILT_IN, **{kind.name: kind for kind in declared}}
