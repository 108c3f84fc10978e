"""The Placement of every worker process of a job: in which pod it runs and which accelerators it gets. Pure.

Each pod of a group is a node of the Inventory of the group. On one machine all pods share the accelerators of the machine and use its
numbers. `placement.componentPlacement` numbers the resources of the groups that it places from 0: accelerators, or process slots on CPU.
All pods of a group are equal, so `componentPlacement` must agree with the fields of each group; it only adds the order of the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError, PlacementError
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, Group, groups_of
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

FIELD = "placement.componentPlacement"
OWN_WORKERS = "rl_core.groups."
"""Package of the worker classes of rljob for declared groups. A process of them uses one accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSlots:
    """The resources that the pods of one group offer to its processes."""

    name: str
    pods: int
    """Number of pods in the job's spec, even if the group was scaled since."""
    gpus: int
    """Accelerators per pod."""
    processes: int
    """Worker processes per pod."""

    @property
    def share(self) -> int:
        """Number of resources of one process: its accelerators, or one slot on CPU."""
        return self.gpus // self.processes or 1

    @property
    def resources(self) -> int:
        """Return the number of resources of all pods."""
        return self.pods * self.processes * self.share

    def place(self, first: Sequence[int]) -> list[list[Placement]]:
        """Return the Placements of the processes, pod by pod; `first` holds the number of the first accelerator of each pod."""
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


def place_processes(
    spec: RLJobSpec, groups: Mapping[str, Group], pods: Mapping[str, int], *, one_machine: bool
) -> dict[str, list[list[Placement]]]:
    """Return the Placement of each worker process by group, pod and rank in the pod; `pods` has the number of pods of each group.

    Raises ConfigError for accelerators that do not divide over processes, PlacementError for a placement block that the pods of the job
    cannot honour.
    """
    slots = {name: _slots_of(group) for name, group in groups.items()}
    order = _order(spec, slots)
    first_slots = {name: [0] * pods[name] for name in groups}
    if one_machine:
        num_colocated = colocated_pods(spec)
        own_slots = {name: replace(slots[name], pods=_own_count(spec, name, slots[name].pods)) for name in order}
        first_slots = _numbered(order, own_slots, {name: _own_count(spec, name, pods[name]) for name in order})
        if num_colocated:
            first_slots[ROLLOUT] = first_slots[ACTOR][:num_colocated] + first_slots[ROLLOUT]
    return {name: slots[name].place(first_slots[name][: pods[name]]) for name in groups}


def colocated_pods(spec: RLJobSpec) -> int:
    """Return how many pods of the actor have the rollouts of a pod in them, in place of the first pods of the rollouts."""
    return 0 if spec.placement.mode == "disaggregated" else spec.actor.replicas


def colocated_rollouts(spec: RLJobSpec) -> int:
    """Return how many rollouts run in pods of the actor; they are those of the lowest ranks."""
    return colocated_pods(spec) * groups_of(spec)[ROLLOUT].processes_per_pod


def own_pods(spec: RLJobSpec, group: str, groups: Mapping[str, Group] | None = None) -> range:
    """Return the indices of the pods of a group, without the rollouts that run in pods of the actor.

    `groups` None: those of the job.
    """
    replicas = (groups_of(spec) if groups is None else groups)[group].replicas
    return range(replicas - _own_count(spec, group, replicas), replicas)


def pod_of(spec: RLJobSpec, job: str, group: str, rank: int) -> str:
    """Return the name of the pod in which the worker process `rank` of a group runs."""
    index = rank // groups_of(spec)[group].processes_per_pod
    colocated = group == ROLLOUT and index < colocated_pods(spec)
    return f"{job}-{ACTOR if colocated else group}-{index}"


def device_count(spec: RLJobSpec) -> int:
    """Return on how many devices the job trains and generates; a process on CPU counts as one, a shared device counts once."""
    rollout = spec.rollout
    return (
        spec.actor.world_size + _own_count(spec, ROLLOUT, rollout.replicas) * rollout.engines * rollout.tensor_parallel
    )


def idle_accelerators(spec: RLJobSpec) -> Iterator[str]:
    """Yield one problem for each group whose pods have more accelerators than its processes use.

    A training process, an engine hf and a process of the worker classes of rljob use one each. SGLang uses all of its pod, and a worker
    class of the user may use all of its process.
    """
    actor, rollout = spec.actor, spec.rollout
    if actor.gpus > actor.processes:
        yield (
            f"actor.processesPerPod must be actor.gpus {actor.gpus}, as a training process uses one accelerator, got {actor.processes}; "
            "remove processesPerPod"
        )
    if rollout.gpus > rollout.tensor_parallel * rollout.engines:
        yield (
            f"rollout.gpus must be 1 with engine {rollout.engine}, which generates on one accelerator, got {rollout.gpus}; "
            "choose engine sglang, or raise replicas instead"
        )
    for group in spec.groups:
        processes = group.processes_per_pod
        if group.worker.startswith(OWN_WORKERS) and group.gpus > processes:
            yield (
                f"group {group.name}: gpus must be processesPerPod {processes}, as a process of {group.worker} uses one accelerator, "
                f"got {group.gpus}; raise processesPerPod or replicas, or lower gpus"
            )


def _own_count(spec: RLJobSpec, group: str, replicas: int) -> int:
    """Return how many of the replicas of a group have a pod of their own."""
    return max(replicas - colocated_pods(spec), 0) if group == ROLLOUT else replicas


def _slots_of(group: Group) -> GroupSlots:
    gpus, processes = group.spec.gpus, group.processes_per_pod
    if gpus % processes:
        raise ConfigError(
            f"{group.name}.gpus must be a multiple of processesPerPod {processes}, got {gpus}; change one of them"
        )
    return GroupSlots(name=group.name, pods=group.replicas, gpus=gpus, processes=processes)


def _numbered(order: Sequence[str], slots: Mapping[str, GroupSlots], pods: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the number of the first accelerator of each pod on one machine.

    Pods that scaling added come after all others, so that the accelerators of running pods keep their numbers.
    """
    first_slots: dict[str, list[int]] = {name: [] for name in order}
    next_slot = 0
    planned = [(name, slots[name].pods) for name in order]
    added = [(name, pods[name] - slots[name].pods) for name in order]
    for name, count in (*planned, *added):
        for _ in range(count):
            first_slots[name].append(next_slot)
            next_slot += slots[name].gpus
    return first_slots


def _order(spec: RLJobSpec, slots: Mapping[str, GroupSlots]) -> list[str]:
    """Return the groups in the order of their resources. Raises PlacementError unless the written placement agrees with the pods."""
    component_placement = spec.placement.component_placement
    if not component_placement:
        return list(slots)
    names = [name.strip() for key in component_placement for name in key.split(",") if name.strip()]
    if unknown := sorted(set(names) - slots.keys()):
        raise PlacementError(f"{FIELD} must place {', '.join(slots)} only, got {', '.join(unknown)}; remove it")
    placed = [slots[name] for name in names]
    on_gpus = {bool(group.gpus) for group in placed}
    if len(on_gpus) > 1:
        counts = ", ".join(f"{group.name}.gpus {group.gpus}" for group in placed)
        raise PlacementError(
            f"{FIELD} must place groups with accelerators or groups without, got {counts}; give each of them gpus, or leave {ENV} out"
        )
    total = sum(_own_count(spec, group.name, group.pods) * group.processes * group.share for group in placed)
    inventory = Inventory([NodeInfo(0, total, "GPU")] if True in on_gpus else [NodeInfo(i, 0) for i in range(total)])
    placement = _read(spec, inventory)
    starts = {group.name: _check_group(group, placement) for group in placed}
    if colocated_pods(spec) and starts.get(ACTOR) != starts.get(ROLLOUT):
        raise PlacementError(
            f"{FIELD} must begin actor and rollout at one resource with mode {spec.placement.mode}, as the first rollouts run in the "
            f"actor's pods, got {dict(component_placement)}; write both from {starts.get(ACTOR, 0)}"
        )
    used_ranks = {rank for group in placed for rank in placement.get_hardware_ranks(group.name)}
    if len(used_ranks) < total:
        raise PlacementError(
            f"{FIELD} must give {ENV} resources of its own, got {dict(component_placement)} for {total}; write ranks that no other group has"
        )
    return sorted(slots, key=lambda name: starts.get(name, total))


def _read(spec: RLJobSpec, inventory: Inventory) -> ModelParallelComponentPlacement:
    config = {
        "componentPlacement": spec.placement.component_placement,
        "mode": spec.placement.mode,
        "recomputeLogProbs": spec.algorithm.recompute_log_probs,
    }
    parallelism = {ROLLOUT: {"tensor": spec.rollout.gpus // spec.rollout.engines or 1}}  # the accelerators of an engine
    try:
        return ModelParallelComponentPlacement(config, inventory, parallelism)
    except PlacementError as error:
        raise type(error)(f"{FIELD}: {error}") from error


def _check_group(group: GroupSlots, placement: ModelParallelComponentPlacement) -> int:
    """Return the first resource of a group. Raises PlacementError unless its processes get the resources that its pods offer."""
    resources = _resources_by_process(placement.get_strategy(group.name))
    ranks_of_group, start = placement.get_hardware_ranks(group.name), resources[0][0]
    count = group.pods * group.processes
    expected = [list(range(start + rank * group.share, start + (rank + 1) * group.share)) for rank in range(count)]
    if resources != expected:
        hybrid = placement.mode is PlacementMode.HYBRID  # Mode hybrid reads a range as one process per resource.
        ranks = f"{start}-{expected[-1][-1]}" + (f":0-{count - 1}" if hybrid and group.share > 1 else "")
        description = f"{count} processes with {group.share} {'accelerators' if group.gpus else 'process slots'} each"
        raise PlacementError(
            f"{FIELD}: component {group.name} must be what its pods are ({description}: {group.name}.replicas {group.pods}, gpus {group.gpus}, "
            f"{group.processes} processes per pod), got {len(resources)} processes "
            f"on {len(ranks_of_group)} from {ranks_of_group[0]} to {ranks_of_group[-1]}; write {ranks}, or change the fields of {group.name}"
        )
    return start


def _resources_by_process(strategy: PlacementStrategy) -> list[list[int]]:
    if isinstance(strategy, NodePlacementStrategy):
        return [[rank] for rank in strategy.node_ranks]
    assert isinstance(strategy, FlexiblePlacementStrategy | PackedPlacementStrategy)
    return strategy.hardware_ranks_list
