"""The slots of a job and who gets them: the Placement of every worker process (runtime.md 1 and 2). Pure.

Each pod of a role is a node of the role's Inventory. On one machine a pod is a share of it, and its accelerators have the machine's numbers.
A written `componentPlacement` numbers the resources of the roles that it places from 0 (accelerators; process slots on CPU). Pods are of one
role and equal, so it must say of each role what the role's own fields say; the order in which it places the roles is honoured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError, PlacementError
from rl_core.plan.placement import (
    FlexiblePlacementStrategy,
    Inventory,
    ModelParallelComponentPlacement,
    NodeInfo,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementMode,
    PlacementStrategy,
)

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.api.roles import RoleSpec

ROLES = ("actor", "rollout", "env")
FIELD = "placement.componentPlacement"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSlots:
    """What the pods of one role offer."""

    name: str
    pods: int
    """As the spec says, whatever the role was scaled to."""
    gpus: int
    """Accelerators per pod."""
    processes: int
    """Worker processes per pod."""

    @property
    def share(self) -> int:
        """Return the resources of one process: its accelerators, or one slot."""
        return self.gpus // self.processes or 1

    @property
    def resources(self) -> int:
        """Return the resources of all pods."""
        return self.pods * self.processes * self.share

    def place(self, first: Sequence[int]) -> list[list[Placement]]:
        """Return the Placement of each process, pod by pod; `first` has the number of each pod's first accelerator."""
        if not first:
            return []
        pods, kind = range(len(first)), "GPU" if self.gpus else None
        inventory = Inventory([NodeInfo(pod, self.gpus, kind, (), first[pod]) for pod in pods])
        strategy: PlacementStrategy
        if self.gpus:
            strategy = PackedPlacementStrategy(0, inventory.num_accelerators - 1, self.share)
        else:
            strategy = NodePlacementStrategy([pod for pod in pods for _ in range(self.processes)])
        placements = strategy.get_placement(inventory)
        return [placements[pod * self.processes : (pod + 1) * self.processes] for pod in pods]


def place_processes(spec: RLJobSpec, pods: Mapping[str, int], *, one_machine: bool) -> dict[str, list[list[Placement]]]:
    """Return the Placement of each worker process by role, pod and rank, for `pods` pods of each role.

    Raises ConfigError for accelerators that do not divide over processes, PlacementError for a placement block that the pods of the job
    cannot honour.
    """
    slots = {role: _slots_of(spec, role) for role in ROLES}
    order = _order(spec, slots)
    first = {role: [0] * pods[role] for role in ROLES}
    if one_machine:
        inside = guests(spec)
        own = {role: replace(slots[role], pods=len(own_pods(spec, role))) for role in order}
        first = _numbered(order, own, {**pods, "rollout": max(pods["rollout"] - inside, 0)})
        first["rollout"] = (first["actor"][:inside] + first["rollout"])[: pods["rollout"]]
    return {role: slots[role].place(first[role]) for role in ROLES}


def guests(spec: RLJobSpec) -> int:
    """Return how many rollouts live in pods of the actor, one in each: those of the lowest ranks."""
    return 0 if spec.placement.mode == "disaggregated" else spec.actor.replicas


def own_pods(spec: RLJobSpec, role: str) -> range:
    """Return the indices of the pods that a role has of its own."""
    replicas: int = getattr(spec, role).replicas
    return range(guests(spec) if role == "rollout" else 0, replicas)


def pod_of(spec: RLJobSpec, job: str, role: str, rank: int) -> str:
    """Return the name of the pod in which a worker process runs."""
    index = rank // spec.actor.processes_per_pod if role == "actor" else rank
    home = "actor" if role == "rollout" and rank < guests(spec) else role
    return f"{job}-{home}-{index}"


def device_count(spec: RLJobSpec) -> int:
    """Return on how many devices the job trains and generates, a process on CPU taken for one; shared ones count once."""
    return spec.actor.world_size + len(own_pods(spec, "rollout"))


def _slots_of(spec: RLJobSpec, role: str) -> RoleSlots:
    of_role: RoleSpec = getattr(spec, role)
    processes = spec.actor.processes_per_pod if role == "actor" else 1
    if of_role.gpus % processes:
        raise ConfigError(
            f"{role}.gpus must be a multiple of processesPerPod {processes}, got {of_role.gpus}; change one of them"
        )
    replicas: int = getattr(spec, role).replicas
    return RoleSlots(name=role, pods=replicas, gpus=of_role.gpus, processes=processes)


def _numbered(order: Sequence[str], slots: Mapping[str, RoleSlots], pods: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the number of the first accelerator of each pod on one machine.

    Pods that scaling added come after all others: the accelerators of pods that run already must keep their numbers.
    """
    first: dict[str, list[int]] = {role: [] for role in order}
    number = 0
    planned = [(role, slots[role].pods) for role in order]
    added = [(role, pods[role] - slots[role].pods) for role in order]
    for role, count in (*planned, *added):
        for _ in range(count):
            first[role].append(number)
            number += slots[role].gpus
    return first


def _order(spec: RLJobSpec, slots: Mapping[str, RoleSlots]) -> list[str]:
    """Return the roles in the order of their resources, once the written placement is found to be that of the pods."""
    written = spec.placement.component_placement
    if not written:
        return list(ROLES)
    names = [name.strip() for key in written for name in key.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(ROLES)):
        raise PlacementError(f"{FIELD} must place {', '.join(ROLES)} only, got {', '.join(unknown)}; remove it")
    placed = [slots[name] for name in names]
    on_gpus = {bool(role.gpus) for role in placed}
    if len(on_gpus) > 1:
        counts = ", ".join(f"{role.name}.gpus {role.gpus}" for role in placed)
        raise PlacementError(
            f"{FIELD} must place roles with accelerators or roles without, got {counts}; give each gpus, or leave env out"
        )
    total = sum(replace(role, pods=len(own_pods(spec, role.name))).resources for role in placed)
    inventory = Inventory([NodeInfo(0, total, "GPU")] if True in on_gpus else [NodeInfo(i, 0) for i in range(total)])
    found = _read(spec, inventory)
    starts = {role.name: _check_role(role, found) for role in placed}
    if guests(spec) and starts.get("actor") != starts.get("rollout"):
        raise PlacementError(
            f"{FIELD} must begin actor and rollout at one resource with mode {spec.placement.mode}, as the first rollouts live in the "
            f"actor's pods, got {dict(written)}; write both from {starts.get('actor', 0)}"
        )
    taken = {rank for role in placed for rank in found.get_hardware_ranks(role.name)}
    if len(taken) < total:
        raise PlacementError(
            f"{FIELD} must give env resources of its own, got {dict(written)} for {total}; write ranks that no other role has"
        )
    return sorted(ROLES, key=lambda role: starts.get(role, total))


def _read(spec: RLJobSpec, inventory: Inventory) -> ModelParallelComponentPlacement:
    config = {
        "componentPlacement": spec.placement.component_placement,
        "mode": spec.placement.mode,
        "recomputeLogProbs": spec.algorithm.recompute_log_probs,
    }
    parallelism = {"rollout": {"tensor": spec.rollout.gpus or 1}}  # one engine has all accelerators of its pod
    try:
        return ModelParallelComponentPlacement(config, inventory, parallelism)
    except PlacementError as error:
        raise type(error)(f"{FIELD}: {error}") from error


def _check_role(role: RoleSlots, found: ModelParallelComponentPlacement) -> int:
    """Return the first resource of a role. Raises PlacementError unless the role's processes have the resources that its pods offer."""
    written = _resources_by_process(found.get_strategy(role.name))
    taken, start = found.get_hardware_ranks(role.name), written[0][0]
    count = role.pods * role.processes
    offered = [list(range(start + rank * role.share, start + (rank + 1) * role.share)) for rank in range(count)]
    if written != offered:
        hybrid = found.mode is PlacementMode.HYBRID  # which takes a range for a process per resource
        ranks = f"{start}-{offered[-1][-1]}" + (f":0-{count - 1}" if hybrid and role.share > 1 else "")
        what = f"{count} processes with {role.share} {'accelerators' if role.gpus else 'process slots'} each"
        raise PlacementError(
            f"{FIELD}: component {role.name} must be what its pods are ({what}: {role.name}.replicas {role.pods}, gpus {role.gpus}, "
            f"{role.processes} processes per pod), got {len(written)} processes "
            f"on {len(taken)} from {taken[0]} to {taken[-1]}; write {ranks}, or change the fields of {role.name}"
        )
    return start


def _resources_by_process(strategy: PlacementStrategy) -> list[list[int]]:
    if isinstance(strategy, NodePlacementStrategy):
        return [[rank] for rank in strategy.node_ranks]
    assert isinstance(strategy, FlexiblePlacementStrategy | PackedPlacementStrategy)
    return strategy.hardware_ranks_list
