"""From a job to processes: which pods, containers and processes there are, with ranks, devices, environment and command.

Pure: equal arguments give byte-equal JSON and digest. The operator makes pods of the plan, rl_core.launch.local processes; neither
adds more than secret mounts, host names and folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError
from rl_core.plan.colocated import colocate, shape_of
from rl_core.plan.parts import ContainerPlan, GpuClaim, LaunchPlan, PodPlan, Ports, ProcessPlan
from rl_core.plan.placement import Placement
from rl_core.plan.slots import ROLES, guests, place_processes

if TYPE_CHECKING:
    from rl_core.api.job import RLJob, RLJobSpec
    from rl_core.api.roles import RoleSpec

__all__ = ["ContainerPlan", "GpuClaim", "LaunchPlan", "PodPlan", "Ports", "ProcessPlan", "build_launch_plan"]

WORKER_COMMAND = ("python", "-m", "rl_core.workers.host")
RUNNER_COMMAND = ("python", "-m", "rl_core.runner")
CHANNEL_COMMAND = ("python", "-m", "rl_core.channel")
CONFIG_PATH = "/etc/rljob/job.json"
"""Where pods of the actor find the resolved job; local mode passes its own path."""
CURVE_PATH = "/etc/rljob/keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """What all processes of a plan share."""

    spec: RLJobSpec
    name: str
    namespace: str
    uid: str
    epoch: int
    ports: Ports
    host: str
    config: str
    local: bool
    attempts: Mapping[str, int]


def build_launch_plan(
    job: RLJob | RLJobSpec,
    *,
    name: str,
    namespace: str = "default",
    uid: str,
    epoch: int = 0,
    replicas: Mapping[str, int] | None = None,
    ports: Ports | None = None,
    host: str | None = None,
    config: str = CONFIG_PATH,
    attempts: Mapping[str, int] | None = None,
) -> LaunchPlan:
    """Return the plan of `job` under `epoch`.

    The placement block decides who has which accelerators; with modes colocated and hybrid actor and rollout share pods and claims.
    `replicas` overrides the pod counts of elastic roles (`{"rollout": 4}`). `host` None: actor-0's name in the job's headless
    Service; a host (local mode, 127.0.0.1): all pods share that machine, so that devices are numbered over all of them.
    `attempts` by role is the first half of the incarnation of pods made now; a replacement needs a higher one than the pod that it replaces.
    Raises ConfigError for replicas of another role or below 0, for accelerators that do not divide over processes, and for a placement
    that the pods of the job cannot honour (PlacementError).
    """
    spec: RLJobSpec = job.spec if hasattr(job, "spec") else job
    counts = {"actor": spec.actor.replicas, "rollout": spec.rollout.replicas, "env": spec.env.replicas}
    for role, count in (replicas or {}).items():
        if role not in ("rollout", "env") or count < 0:
            raise ConfigError(
                f"replicas may override rollout and env with a count of at least 0, got {role}: {count}; correct it"
            )
        counts[role] = count
    context = _Context(
        spec=spec,
        name=name,
        namespace=namespace,
        uid=uid,
        epoch=epoch,
        ports=ports or Ports(),
        host=host or f"{name}-actor-0.{name}.{namespace}.svc",
        config=config,
        local=host is not None,
        attempts=attempts or {},
    )
    placements = place_processes(spec, counts, one_machine=context.local)
    pods = tuple(_build_pod(context, role, index, placements[role]) for role in ROLES for index in range(counts[role]))
    plan = LaunchPlan(job=name, namespace=namespace, uid=uid, epoch=epoch, pods=pods)
    return colocate(plan, shape=shape_of(spec), spare=spec.placement.mode == "hybrid") if guests(spec) else plan


def _build_pod(context: _Context, role: str, index: int, by_pod: list[list[Placement]]) -> PodPlan:
    """Return the pod; `by_pod` are the Placements of the role's processes, pod by pod."""
    spec: RoleSpec = getattr(context.spec, role)
    processes = []
    if role == "actor" and index == 0:
        processes += [_service(context, "runner", RUNNER_COMMAND), _service(context, "channel", CHANNEL_COMMAND)]
    world = len(by_pod) * len(by_pod[index])
    processes += [_worker(context, role, spec, placement, world=world) for placement in by_pod[index]]
    return PodPlan(
        name=f"{context.name}-{role}-{index}",
        role=role,
        index=index,
        containers=(ContainerPlan(name=role, image_role=role, processes=tuple(processes)),),
        claim=GpuClaim(count=spec.gpus) if spec.gpus else None,
    )


def _identity(context: _Context, role: str, pod_role: str, index: int) -> dict[str, str]:
    env = {
        "RLJOB_NAME": context.name,
        "RLJOB_NAMESPACE": context.namespace,
        "RLJOB_UID": context.uid,
        "RLJOB_EPOCH": str(context.epoch),
        "RLJOB_ROLE": role,
        "RLJOB_POD": f"{context.name}-{pod_role}-{index}",
        "RLJOB_POD_INDEX": str(index),
        "RLJOB_INCARNATION": f"{context.attempts.get(pod_role, 0)}.0",
        "RLJOB_HUB": f"tcp://{context.host}:{context.ports.hub}",
        "RLJOB_CHANNEL": f"tcp://{context.host}:{context.ports.channel}",
        "RLJOB_CURVE_DIR": CURVE_PATH,
        "RLJOB_HEALTH_PORT": str(context.ports.health),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if pod_role == "actor":
        env |= {"RLJOB_CONFIG": context.config, "RLJOB_CONTROL_PORT": str(context.ports.control)}
    return env


def _service(context: _Context, role: str, command: tuple[str, ...]) -> ProcessPlan:
    """Return the runner or the channel server, processes of actor-0."""
    port = {"runner": context.ports.hub, "channel": context.ports.channel}[role]
    ports = {"hub": port, "control": context.ports.control} if role == "runner" else {"channel": port}
    env = dict(context.spec.actor.env) | _identity(context, role, "actor", 0)
    env |= {"GROUP_NAME": role, "WORKER_NAME": f"{role}:0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return ProcessPlan(name=role, group=role, rank=0, command=command, env=env, ports=ports)


def _worker(context: _Context, role: str, spec: RoleSpec, placement: Placement, *, world: int) -> ProcessPlan:
    """Return one worker process; it sees the accelerators of its placement only."""
    rank = placement.rank
    env = dict(spec.env) | _identity(context, role, role, placement.placement_node_rank) | placement.to_env()
    env |= {
        "GROUP_NAME": role,
        "WORKER_NAME": f"{role}:{rank}",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if role == "actor":
        env |= {"MASTER_ADDR": context.host, "MASTER_PORT": str(context.ports.master)}
    elif not context.local:
        env |= {"RLJOB_RPC_PORT": str(context.ports.rpc)}
    return ProcessPlan(
        name=f"{role}-{rank}",
        group=role,
        rank=rank,
        command=WORKER_COMMAND,
        env=env,
        visible_devices=tuple(placement.visible_accelerators),
        restart=role != "actor",
    )
