"""From a job to processes: which pods, containers and processes there are, with ranks, devices, environment and command.

The functions are pure: equal arguments give byte-equal JSON and an equal digest. The operator turns the plan into pods,
`rl_core.launch.local` turns it into local processes. Both add only secret mounts, host names and folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError
from rl_core.plan.colocated import colocate, shape_of
from rl_core.plan.engine_arguments import check_engine_arguments
from rl_core.plan.groups import CONTROL_GROUP, KINDS_VARIABLE, Group, groups_of, kinds_as_variable
from rl_core.plan.node_network import check, port_offset
from rl_core.plan.parts import ContainerPlan, GpuClaim, LaunchPlan, PodPlan, Ports, ProcessPlan
from rl_core.plan.placement import Placement
from rl_core.plan.slots import colocated_pods, place_processes

if TYPE_CHECKING:
    from rl_core.api.job import RLJob, RLJobSpec

__all__ = ["ContainerPlan", "GpuClaim", "LaunchPlan", "PodPlan", "Ports", "ProcessPlan", "build_launch_plan"]

WORKER_COMMAND = ("python", "-m", "rl_core.workers.host")
RUNNER_COMMAND = ("python", "-m", "rl_core.runner")
CHANNEL_COMMAND = ("python", "-m", "rl_core.channel")
CONFIG_PATH = "/etc/rljob/job.json"
"""Where the pods of the control group find the resolved job; a local run passes its own path."""
CURVE_PATH = "/etc/rljob/keys"
COPY_SETTINGS = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1000000"}
"""Environment variables that make glibc copy blocks of 16 MiB and more with non-temporal stores, which bypass the caches and are faster.

By default it does so from three quarters of the last cache's size, and virtual machines report caches of hundreds of megabytes. Other C
libraries and processors ignore the variable. One that the user sets wins.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """Values that are the same for all processes of a plan."""

    groups: Mapping[str, Group]
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
    groups: Mapping[str, Group] | None = None,
) -> LaunchPlan:
    """Return the plan of `job` under `epoch`.

    `groups` are the groups to start (None: those of the job). The placement block decides which process gets which accelerators; with
    the modes colocated and hybrid actors and rollouts share pods and claims.
    `replicas` overrides the pod counts of elastic groups, for example `{"rollout": 4}`. `attempts` maps a worker group to the number of the
    start of its pods, the first half of the incarnation (`Identity.incarnation`); a replacement needs a higher number.
    `host` None is for a cluster: processes find the runner by the name of its pod in the headless Service of the job. Any other
    host, such as 127.0.0.1, is for one machine: all pods run there, and accelerators are numbered over all of them.
    Raises ConfigError for replicas of a group that is not elastic or below 0, for accelerators that do not divide over processes,
    for two gangs of several processes on one machine, for hostNetwork of only some groups that hold weights, for an init container with
    the name of another container of its pod, and for arguments that the engine does not take;
    PlacementError for a placement that the pods of the job cannot honour.
    """
    spec: RLJobSpec = job.spec if hasattr(job, "spec") else job
    check_engine_arguments(spec)
    groups = groups_of(spec) if groups is None else groups
    local = host is not None
    gangs = [group.name for group in groups.values() if not group.elastic and group.world_size > 1]
    if local and len(gangs) > 1:
        raise ConfigError(
            f"one machine can run one gang of several processes, as a plan has one rendezvous port, got {', '.join(gangs)}"
        )
    if not local:
        check(groups)
    context = _Context(
        groups=groups,
        name=name,
        namespace=namespace,
        uid=uid,
        epoch=epoch,
        ports=ports or Ports(),
        host=host or _pod_host(name, namespace, CONTROL_GROUP),
        config=config,
        local=local,
        attempts=attempts or {},
    )
    counts = _pod_counts(groups, replicas or {})
    placements = place_processes(spec, groups, counts, one_machine=local)
    pods = tuple(
        _build_pod(context, group, index, placements[group.name])
        for group in groups.values()
        for index in range(counts[group.name])
    )
    plan = LaunchPlan(job=name, namespace=namespace, uid=uid, epoch=epoch, pods=pods)
    if colocated_pods(spec):
        plan = colocate(plan, shape=shape_of(spec), spare=spec.placement.mode == "hybrid")
    if not local:
        _check_container_names(plan, groups)
    return plan


def _check_container_names(plan: LaunchPlan, groups: Mapping[str, Group]) -> None:
    """Raise ConfigError if an init container has the name of another container of its pod, which the API server refuses."""
    for pod in plan.pods:
        names = [container.name for container in pod.containers]
        for container in pod.containers:
            for init in groups[container.image_role].spec.init_containers:
                if init.name in names:
                    raise ConfigError(
                        f"initContainers of {container.image_role} must have names that no other container of their pod has, got {init.name} "
                        f"beside {', '.join(names)}; rename it"
                    )
                names.append(init.name)


def _pod_counts(groups: Mapping[str, Group], replicas: Mapping[str, int]) -> dict[str, int]:
    elastic = [group.name for group in groups.values() if group.elastic]
    for name, count in replicas.items():
        if name not in elastic or count < 0:
            raise ConfigError(
                f"replicas may override {' and '.join(elastic)} with a count of at least 0, got {name}: {count}; correct it"
            )
    return {group.name: group.replicas for group in groups.values()} | dict(replicas)


def _pod_host(name: str, namespace: str, group: str) -> str:
    """Return the host name of pod 0 of a group in the headless Service of the job."""
    return f"{name}-{group}-0.{name}.{namespace}.svc"


def _build_pod(context: _Context, group: Group, index: int, by_pod: list[list[Placement]]) -> PodPlan:
    """Return the plan of one pod; `by_pod` holds the Placements of the processes of the group, pod by pod."""
    processes = []
    if group.name == CONTROL_GROUP and index == 0:
        processes += [_service(context, "runner", RUNNER_COMMAND), _service(context, "channel", CHANNEL_COMMAND)]
    world = len(by_pod) * len(by_pod[index])
    processes += [_worker(context, group, placement, world=world) for placement in by_pod[index]]
    return PodPlan(
        name=f"{context.name}-{group.name}-{index}",
        role=group.name,
        index=index,
        containers=(ContainerPlan(name=group.name, image_role=group.name, processes=tuple(processes)),),
        claim=GpuClaim(count=group.spec.gpus) if group.spec.gpus else None,
    )


def _offset(context: _Context, group: str, index: int, process: int = 0) -> int:
    """Return the number that is added to the ports of a process of pod `index` of a group; 0 in a local run, whose launcher picks free ports."""
    return 0 if context.local else port_offset(context.groups, group, index, process)


def _identity(context: _Context, role: str, group: str, index: int) -> dict[str, str]:
    """Return the variables that identify a process of role `role` in pod `index` of `group`."""
    env = {
        "RLJOB_NAME": context.name,
        "RLJOB_NAMESPACE": context.namespace,
        "RLJOB_UID": context.uid,
        "RLJOB_EPOCH": str(context.epoch),
        "RLJOB_ROLE": role,
        "RLJOB_POD": f"{context.name}-{group}-{index}",
        "RLJOB_POD_INDEX": str(index),
        "RLJOB_INCARNATION": f"{context.attempts.get(group, 0)}.0",
        "RLJOB_HUB": f"tcp://{context.host}:{context.ports.hub}",
        "RLJOB_CHANNEL": f"tcp://{context.host}:{context.ports.channel}",
        "RLJOB_CURVE_DIR": CURVE_PATH,
        "RLJOB_HEALTH_PORT": str(context.ports.health + _offset(context, group, index)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if kinds := kinds_as_variable(context.groups):
        env[KINDS_VARIABLE] = kinds
    if group == CONTROL_GROUP:
        env |= {"RLJOB_CONFIG": context.config, "RLJOB_CONTROL_PORT": str(context.ports.control)}
    return env


def _service(context: _Context, role: str, command: tuple[str, ...]) -> ProcessPlan:
    """Return the runner or the channel server, which run in pod 0 of the control group."""
    port = {"runner": context.ports.hub, "channel": context.ports.channel}[role]
    ports = {"hub": port, "control": context.ports.control} if role == "runner" else {"channel": port}
    env = COPY_SETTINGS | context.groups[CONTROL_GROUP].spec.env | _identity(context, role, CONTROL_GROUP, 0)
    env |= {"GROUP_NAME": role, "WORKER_NAME": f"{role}:0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return ProcessPlan(name=role, group=role, rank=0, command=command, env=env, ports=ports)


def _worker(context: _Context, group: Group, placement: Placement, *, world: int) -> ProcessPlan:
    """Return one worker process; only the accelerators of its placement are visible to it."""
    name, rank = group.name, placement.rank
    env = (
        COPY_SETTINGS
        | group.spec.env
        | _identity(context, name, name, placement.placement_node_rank)
        | placement.to_env()
    )
    env |= {
        "GROUP_NAME": name,
        "WORKER_NAME": f"{name}:{rank}",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": str(group.spec.threads),
    }
    if not group.elastic:
        master_host = context.host if context.local else _pod_host(context.name, context.namespace, name)
        env |= {"MASTER_ADDR": master_host, "MASTER_PORT": str(context.ports.master)}
    elif not context.local:
        offset = _offset(context, name, placement.placement_node_rank, placement.local_rank)
        env |= {"RLJOB_RPC_PORT": str(context.ports.rpc + offset)}
        if group.endpoint_callers:
            env |= {"RLJOB_ENDPOINT_PORT": str(context.ports.endpoint + offset)}
    return ProcessPlan(
        name=f"{name}-{rank}",
        group=name,
        rank=rank,
        command=WORKER_COMMAND,
        env=env,
        visible_devices=tuple(placement.visible_accelerators),
        restart=group.elastic,
    )
