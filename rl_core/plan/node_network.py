"""Pods on the network of their node (`hostNetwork`): which combinations of groups work, and the ports of each pod.

NetworkPolicies neither select such pods nor recognise them as peers: to a policy, they are the addresses of their nodes, and which address
that is depends on the network plug-in. Groups that hold weights talk to each other on ephemeral ports without authentication, which a policy
can only permit for pods. All of them must therefore be on the network of their nodes, or none.

The pods of a node share its ports. Each pod of a job has ports of its own, so that several of them fit on one node. Pods of different jobs
may ask for equal ports; the scheduler keeps these apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import Group

STRIDE = 10
"""Distance between the ports of two pods of a job; a pod has fewer ports than that."""


def is_on_node(group: Group) -> bool:
    """Return whether the pods of a group use the network of their nodes."""
    return bool(getattr(group.spec, "host_network", False))


def port_offset(groups: Mapping[str, Group], name: str, index: int) -> int:
    """Return the number that is added to the ports of a pod on the network of its node; 0 for the first one and for all other pods."""
    if not is_on_node(groups[name]):
        return 0
    before = 0
    for group in groups.values():
        if group.name == name:
            break
        before += group.replicas if is_on_node(group) else 0
    return STRIDE * (before + index)


def check(groups: Mapping[str, Group]) -> None:
    """Raise ConfigError if only some of the groups that hold weights are on the network of their nodes."""
    holding = [group for group in groups.values() if group.holds_model and group.replicas]
    on_nodes = [group.name for group in holding if is_on_node(group)]
    others = [group.name for group in holding if not is_on_node(group)]
    if on_nodes and others:
        raise ConfigError(
            f"hostNetwork must be true for all groups that hold weights or for none, got {', '.join(on_nodes)} without {', '.join(others)}: "
            "no NetworkPolicy can permit NCCL, gloo and transfers of weights between pods and the addresses of nodes; set it for actor and "
            "rollout and declare no other such group, or remove it and give the pods RDMA by a device plugin (resources.limits, IPC_LOCK)"
        )
