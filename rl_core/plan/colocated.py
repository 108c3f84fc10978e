"""Actor and rollout on the same accelerators: a disaggregated launch plan turned into a colocated one. Pure.

    containers   one pod per pair, two containers sharing one claim (DRA), or on CPU
    processes    one pod per pair, one container with both processes (the device plugin gives a device to one container only)

Two ranks of NCCL cannot share a GPU, so colocated weights are never handed over by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rl_core.api.errors import ConfigError
from rl_core.plan.parts import ContainerPlan, GpuClaim, LaunchPlan, PodPlan, ProcessPlan

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

Shape = Literal["containers", "processes"]
SECOND_HEALTH_PORT = 7706
"""Health port of a pod's second supervisor; containers of a pod share its ports."""

OF_PROCESS = frozenset({"env", "gpus", "replicas", "threads"})
OF_CONTAINER = frozenset(
    {"env_from", "env_value_from", "image", "image_pull_policy", "init_containers", "resource_claims", "resources", "volume_mounts", "volumes"}
)  # fmt: skip
"""Fields of `rollout` that hold beside the actor's in a shared container, and those that need one of their own."""
OF_CLAIM = ("gpu_allocation", "device_class")


def shape_of(spec: RLJobSpec) -> Shape:
    """Return how actor and rollout of a colocated job share.

    Two containers cannot ask a device plugin for the same accelerator; they can hold one claim, and need none on CPU.
    Raises ConfigError for fields of the rollout that a guest of the actor's pod cannot have.
    """
    shape: Shape = "processes" if spec.actor.gpus and spec.actor.gpu_allocation == "devicePlugin" else "containers"
    own = OF_PROCESS | (OF_CONTAINER if shape == "containers" else frozenset())
    actor, rollout = spec.actor, spec.rollout
    for name, field in type(rollout).model_fields.items():
        if name in own or name not in type(actor).model_fields:
            continue
        given, theirs = getattr(rollout, name), getattr(actor, name)
        free = field.get_default(call_default_factory=True) if shape == "processes" or name not in OF_CLAIM else theirs
        if given not in (free, theirs):
            raise ConfigError(
                f"rollout.{field.alias} must be that of actor with placement.mode {spec.placement.mode}, as they share a pod, "
                f"got {given} beside {theirs}; remove it, or write it in actor"
            )
    return shape


def colocate(plan: LaunchPlan, *, shape: Shape, spare: bool = False) -> LaunchPlan:
    """Return `plan` with each actor pod and the rollout pod of its index in one; `spare` allows further rollouts, in pods of their own.

    Raises ConfigError unless there is a rollout pod for each actor pod, with as many accelerators.
    """
    actors, rollouts = plan.pods_of("actor"), plan.pods_of("rollout")
    guests, others = rollouts[: len(actors)] if spare else rollouts, rollouts[len(actors) :]
    asked = [(len(pods), pods[0].claim.count if pods and pods[0].claim else 0) for pods in (actors, guests)]
    if asked[0] != asked[1]:
        raise ConfigError(
            f"actor and rollout that share devices must have equal replicas and gpus, got {asked[0]} and {asked[1]}; make them equal"
            f"{', or give rollout more replicas' if spare else ''}"
        )
    merge = _as_containers if shape == "containers" else _as_processes
    pairs = [merge(actor, rollout) for actor, rollout in zip(actors, guests, strict=True)]
    return replace(plan, pods=(*pairs, *others, *plan.pods_of("env")))


def _as_containers(actor: PodPlan, rollout: PodPlan) -> PodPlan:
    second = tuple(_moved(container, actor, health_port=SECOND_HEALTH_PORT) for container in rollout.containers)
    return replace(actor, containers=(*actor.containers, *second), claim=_shared(actor))


def _as_processes(actor: PodPlan, rollout: PodPlan) -> PodPlan:
    (own,) = actor.containers
    inside = tuple(process for container in rollout.containers for process in _moved(container, actor).processes)
    return replace(actor, containers=(replace(own, processes=(*own.processes, *inside)),), claim=_shared(actor))


def _shared(actor: PodPlan) -> GpuClaim | None:
    return replace(actor.claim, shared=True) if actor.claim is not None else None


def _moved(container: ContainerPlan, pod: PodPlan, *, health_port: int | None = None) -> ContainerPlan:
    """Return `container` with its processes in another pod."""

    def move(process: ProcessPlan) -> ProcessPlan:
        env = {**process.env, "RLJOB_POD": pod.name}
        if health_port is not None:
            env["RLJOB_HEALTH_PORT"] = str(health_port)
        return replace(process, env=env)

    return replace(container, processes=tuple(move(process) for process in container.processes))
