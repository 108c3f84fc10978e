"""Colocated placement: actor and rollout on the same accelerators. The functions turn a disaggregated launch plan into a colocated one.

    containers   One pod per pair, with two containers that share one resource claim (DRA), or that run on CPU.
    processes    One pod per pair, with one container for both processes, as a device plugin gives a device to one container only.

NCCL does not allow two ranks on one GPU, so colocated weights never use it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import ACTOR, ROLLOUT
from rl_core.plan.parts import ContainerPlan, GpuClaim, LaunchPlan, PodPlan, ProcessPlan

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.api.volumes import Volume

Shape = Literal["containers", "processes"]
SECOND_HEALTH = 4
"""Distance from the health port of a pod to that of its second supervisor. The containers of a pod share its ports, so it is none of Ports."""

PROCESS_FIELDS = frozenset({"env", "gpus", "replicas", "threads"})
CONTAINER_FIELDS = frozenset(
    {"env_from", "env_value_from", "image", "image_pull_policy", "init_containers", "resource_claims", "resources", "volume_mounts", "volumes"}
)  # fmt: skip
"""Fields that `rollout` may set for its process in a shared container, and those that it may set only for a container of its own."""
CLAIM_FIELDS = ("gpu_allocation", "device_class")


def shape_of(spec: RLJobSpec) -> Shape:
    """Return "processes" if actor and rollout of a colocated job share a container, "containers" if they only share a pod.

    A device plugin never gives one accelerator to two containers; a resource claim can be shared, and processes on CPU need none.
    Raises ConfigError for fields and volumes of `rollout` that cannot differ from those of the actor in the same pod, and for
    `weights.transport: ipc` with rollouts on other devices than those of the actor.
    """
    if spec.weights.transport == "ipc" and spec.rollout.replicas > spec.actor.replicas:
        raise ConfigError(
            f"weights.transport ipc reaches rollouts on the actor's devices alone, got rollout.replicas {spec.rollout.replicas} beside "
            f"{spec.actor.replicas} of actor; write auto"
        )
    shape: Shape = "processes" if spec.actor.gpus and spec.actor.gpu_allocation == "devicePlugin" else "containers"
    own_fields = PROCESS_FIELDS | (CONTAINER_FIELDS if shape == "containers" else frozenset())
    actor, rollout = spec.actor, spec.rollout
    for name, field in type(rollout).model_fields.items():
        if name in own_fields or name not in type(actor).model_fields:
            continue
        rollout_value, actor_value = getattr(rollout, name), getattr(actor, name)
        by_default = field.get_default(call_default_factory=True)
        unset = by_default if shape == "processes" or name not in CLAIM_FIELDS else actor_value
        if rollout_value not in (unset, actor_value):
            raise ConfigError(
                f"rollout.{field.alias} must be that of actor with placement.mode {spec.placement.mode}, as they share a pod, "
                f"got {rollout_value} beside {actor_value}; remove it, or write it in actor"
            )
    if shape == "containers":
        _check_volumes(spec)
    return shape


def _check_volumes(spec: RLJobSpec) -> None:
    """Raise ConfigError if actor and rollout define different volumes of one name: a pod has one volume of a name."""
    of_actor = {volume.name: volume for volume in spec.actor.volumes}
    for volume in spec.rollout.volumes:
        if (actor_volume := of_actor.get(volume.name, volume)) != volume:
            raise ConfigError(
                f"rollout.volumes must define {volume.name} as actor.volumes does with placement.mode {spec.placement.mode}, as they share a "
                f"pod, got {_written(volume)} beside {_written(actor_volume)}; rename one of them with its mounts, or write both alike"
            )


def _written(volume: Volume) -> str:
    return json.dumps(volume.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"name"}))


def colocate(plan: LaunchPlan, *, shape: Shape, spare: bool = False) -> LaunchPlan:
    """Return `plan` with each actor pod merged with the rollout pod of the same index.

    With `spare` (hybrid placement) there may be more rollouts than actors; the surplus rollouts keep pods of their own.
    Raises ConfigError unless there is a rollout pod for each actor pod, with as many accelerators.
    """
    actors, rollouts = plan.pods_of(ACTOR), plan.pods_of(ROLLOUT)
    merged, spares = rollouts[: len(actors)] if spare else rollouts, rollouts[len(actors) :]
    sizes = [(len(pods), pods[0].claim.count if pods and pods[0].claim else 0) for pods in (actors, merged)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"actor and rollout that share devices must have equal replicas and gpus, got {sizes[0]} and {sizes[1]}; make them equal"
            f"{', or give rollout more replicas' if spare else ''}"
        )
    merge = _as_containers if shape == "containers" else _as_processes
    pairs = [merge(actor, rollout) for actor, rollout in zip(actors, merged, strict=True)]
    other_pods = [pod for pod in plan.pods if pod.role not in (ACTOR, ROLLOUT)]
    return replace(plan, pods=(*pairs, *spares, *other_pods))


def _as_containers(actor: PodPlan, rollout: PodPlan) -> PodPlan:
    health = int(actor.containers[0].processes[0].env["RLJOB_HEALTH_PORT"]) + SECOND_HEALTH
    second = tuple(_moved(container, actor, health_port=health) for container in rollout.containers)
    return replace(actor, containers=(*actor.containers, *second), claim=_shared(actor))


def _as_processes(actor: PodPlan, rollout: PodPlan) -> PodPlan:
    (actor_container,) = actor.containers
    rollout_processes = tuple(
        process for container in rollout.containers for process in _moved(container, actor).processes
    )
    return replace(
        actor,
        containers=(replace(actor_container, processes=(*actor_container.processes, *rollout_processes)),),
        claim=_shared(actor),
    )


def _shared(actor: PodPlan) -> GpuClaim | None:
    return replace(actor.claim, shared=True) if actor.claim is not None else None


def _moved(container: ContainerPlan, pod: PodPlan, *, health_port: int | None = None) -> ContainerPlan:
    """Return `container` with the environment of its processes changed to run in `pod`."""

    def move(process: ProcessPlan) -> ProcessPlan:
        env = {**process.env, "RLJOB_POD": pod.name}
        if health_port is not None:
            env["RLJOB_HEALTH_PORT"] = str(health_port)
        return replace(process, env=env)

    return replace(container, processes=tuple(move(process) for process in container.processes))
