"""Pods on the network of their node (`hostNetwork`): which combinations of groups work, and the ports of each pod.

NetworkPolicies neither select such pods nor recognise them as peers: to a policy, they are the addresses of their nodes, and which address
that is depends on the network plug-in. Groups that hold weights talk to each other on ephemeral ports without authentication, which a policy
can only permit for pods. All of them must therefore be on the network of their nodes, or none.

The processes of a pod share its ports, and the pods of a node share those of the node. Each process of an elastic group has ports of its
own in its pod, and on the network of a node each has ports of its own in the job, so that several pods of a job fit on one node. Pods of
different jobs may ask for equal ports; the scheduler keeps these apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import Group
from rl_core.plan.parts import Ports

STRIDE = 10
"""Distance between the ports of two processes of elastic groups, and of two pods of a gang; each has fewer ports than that."""
FIRST_NODE_PORT = 30_000
"""The first port that Kubernetes gives to Services on nodes."""


def is_on_node(group: Group) -> bool:
    """Return whether the pods of a group use the network of their nodes."""
    return bool(getattr(group.spec, "host_network", False))


def listeners(group: Group) -> int:
    """Return how many processes of a pod have ports of their own. The processes of a gang take free ones."""
    return group.processes_per_pod if group.elastic else 1


def port_offset(groups: Mapping[str, Group], name: str, index: int, process: int = 0) -> int:
    """Return the number that is added to the ports of process `process` of pod `index` of a group.

    It is 0 for the first process of each pod with a network of its own, and of the first pod on the network of its node.
    """
    if not is_on_node(groups[name]):
        return STRIDE * process
    num_before = 0
    for group in groups.values():
        if group.name == name:
            break
        num_before += group.replicas * listeners(group) if is_on_node(group) else 0
    return STRIDE * (num_before + index * listeners(groups[name]) + process)


def check(groups: Mapping[str, Group]) -> None:
    """Raise ConfigError if only some of the groups that hold weights are on the network of their nodes, or if they need too many ports."""
    holding = [group for group in groups.values() if group.holds_model and group.replicas]
    on_nodes = [group.name for group in holding if is_on_node(group)]
    other_groups = [group.name for group in holding if not is_on_node(group)]
    if on_nodes and other_groups:
        raise ConfigError(
            f"hostNetwork must be true for all groups that hold weights or for none, got {', '.join(on_nodes)} without {', '.join(other_groups)}: "
            "no NetworkPolicy can permit NCCL, gloo and transfers of weights between pods and the addresses of nodes; set it for actor and "
            "rollout and declare no other such group, or remove it and give the pods RDMA by a device plugin (resources.limits, IPC_LOCK)"
        )
    max_offset = max((port_offset(groups, name, groups[name].replicas) for name in on_nodes), default=0)
    if (highest := max(asdict(Ports()).values()) + max_offset) >= FIRST_NODE_PORT:
        raise ConfigError(
            f"hostNetwork needs ports below {FIRST_NODE_PORT}, {STRIDE} for each engine, got {highest}; lower rollout.replicas, or raise tp_size of "
            "rollout.engineArgs"
        )
