"""The resources for placement: nodes, groups of nodes, and the units of a group (accelerators, other hardware, or nodes)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl_core.api.errors import PlacementError, PlacementRangeError

ACCELERATOR = "accelerator"
CLUSTER = "cluster"
"""Reserved label: the nodes that have accelerators (all nodes where none has)."""
NODE = "node"
"""Reserved label: all nodes, each as one unit."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node: a pod, or a share of one machine."""

    rank: int
    """Rank of the node; accelerators are numbered over the nodes in the order of their ranks."""
    accelerators: int
    """Number of accelerators."""
    accelerator_type: str | None = None
    """Their type; None = unknown."""
    hardware: tuple[str, ...] = ()
    """Type name of each further unit of hardware, such as ("robot", "robot", "camera")."""
    first_accelerator: int = 0
    """Number of its first accelerator on the machine; above 0 where the node is a share of a machine."""

    def __post_init__(self) -> None:
        if min(self.rank, self.accelerators, self.first_accelerator) < 0:
            raise PlacementError(
                f"node rank, accelerators and first_accelerator must be >= 0, got {self.rank}, {self.accelerators}, {self.first_accelerator}"
            )

    @property
    def accelerator_numbers(self) -> range:
        """Numbers of its accelerators on the machine, as CUDA_VISIBLE_DEVICES uses them."""
        return range(self.first_accelerator, self.first_accelerator + self.accelerators)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes under a label, with the environment and the Python interpreter of their workers."""

    label: str
    """Unique; not `cluster` or `node`."""
    node_ranks: Sequence[int]
    """Members."""
    env: Sequence[Mapping[str, str]] = ()
    """One-key maps of environment variables; they override the pod's and are overridden by the worker's."""
    interpreter: str | None = None
    """Python of its workers; None = the launcher's."""
    hardware: str | None = None
    """Type of the units processes are placed on; None = accelerators, or nodes where there are none."""
    ignore_hardware: bool = False
    """Whether the units are nodes even where these have accelerators."""

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or self.label in (CLUSTER, NODE, "") or "," in self.label:
            raise PlacementError(
                f"node group label must not be empty, reserved ({CLUSTER}, {NODE}) or hold a comma, got {self.label!r}; rename it"
            )
        if self.ignore_hardware and self.hardware is not None:
            raise PlacementError(
                f"node group {self.label}: ignore_hardware excludes hardware, got {self.hardware!r}; remove one of them"
            )
        if not self.node_ranks or len(set(self.node_ranks)) != len(self.node_ranks):
            raise PlacementError(
                f"node group {self.label}: node_ranks must be given, each once, got {list(self.node_ranks)}"
            )
        if not isinstance(self.env, list | tuple) or not all(map(_is_variable, self.env)):
            raise PlacementError(
                f"node group {self.label}: env items must be one-key maps of text, got {self.env!r}; write `- NAME: value`"
            )


def _is_variable(item: object) -> bool:
    """Return whether an item of `env` is one name with its value."""
    return (
        isinstance(item, Mapping)
        and len(item) == 1
        and all(isinstance(text, str) for pair in item.items() for text in pair)
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """One accelerator, piece of other hardware, or node on which a process can be placed."""

    node: NodeInfo
    local_rank: int
    """Index among the units of its kind on the machine; 0 for a node."""
    label: str
    """Label of the group it was reached through."""
    kind: str | None
    """`accelerator`, a hardware type, or None for a whole node."""

    @property
    def identity(self) -> tuple[int, str, int]:
        """Return a key that is equal for the same physical unit in different groups."""
        return (self.node.rank, self.kind or NODE, self.local_rank)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes and groups. Raises PlacementError when ranks or labels repeat or a (node, type) pair is in two groups."""

    nodes: Sequence[NodeInfo]
    groups: Sequence[NodeGroup] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.rank)))
        object.__setattr__(self, "groups", tuple(self.groups))
        ranks = [node.rank for node in self.nodes]
        if ranks != list(range(len(ranks))):
            raise PlacementError(f"node ranks must be 0..{len(ranks) - 1}, each once, got {ranks}; renumber the nodes")
        labels = [group.label for group in self.groups]
        if len(set(labels)) != len(labels):
            raise PlacementError(f"node group labels must be unique, got {labels}; rename one")
        owners: dict[tuple[int, str], str] = {}
        for group in self.groups:
            pairs = {(unit.node.rank, unit.kind) for unit in self.units(group.label) if unit.kind is not None}
            for rank, kind in sorted(pairs):
                owner = owners.setdefault((rank, kind), group.label)
                if owner != group.label:
                    raise PlacementError(
                        f"node {rank} with {kind} must be in one group only, got {owner} and {group.label}; "
                        "remove it from one, or set ignore_hardware"
                    )

    @property
    def num_accelerators(self) -> int:
        """Return the number of accelerators of all nodes."""
        return sum(node.accelerators for node in self.nodes)

    def group(self, label: str) -> NodeGroup | None:
        """Return the declared node group of `label`, None for a reserved label. Raises PlacementError for an unknown label."""
        if label in (CLUSTER, NODE):
            return None
        for group in self.groups:
            if group.label == label:
                return group
        labels = ", ".join([CLUSTER, NODE, *(group.label for group in self.groups)])
        raise PlacementError(f"node group {label!r} must be one of {labels}; declare it or use one of these")

    def nodes_of(self, label: str) -> tuple[NodeInfo, ...]:
        """Return the nodes of a group in rank order."""
        group = self.group(label)
        if group is None:
            equipped = tuple(node for node in self.nodes if node.accelerators)
            return equipped if label == CLUSTER and equipped else tuple(self.nodes)
        for rank in group.node_ranks:
            if not 0 <= rank < len(self.nodes):
                raise PlacementRangeError(
                    f"node group {label}: node rank {rank} is out of range [0, {len(self.nodes) - 1}]; remove it or add the node"
                )
        return tuple(self.nodes[rank] for rank in sorted(group.node_ranks))

    def units(self, label: str) -> tuple[Unit, ...]:
        """Return the units of a group in the order of their resource ranks."""
        group = self.group(label)
        nodes = self.nodes_of(label)
        if label == NODE or (group is not None and group.ignore_hardware):
            return tuple(Unit(node, 0, label, None) for node in nodes)
        if group is not None and group.hardware is not None:
            return self._hardware_units(group, nodes)
        types = sorted({node.accelerator_type or ACCELERATOR for node in nodes if node.accelerators})
        if not types:
            return tuple(Unit(node, 0, label, None) for node in nodes)
        if group is not None and len(types) > 1:
            raise PlacementError(
                f"node group {label}: its nodes must have one accelerator type, got {', '.join(types)}; make a group per type"
            )
        return tuple(Unit(node, number, label, ACCELERATOR) for node in nodes for number in node.accelerator_numbers)

    def units_of(self, labels: Iterable[str]) -> tuple[Unit, ...]:
        """Return the units of several groups, in the order the groups are listed."""
        listed = list(labels)
        if len(set(listed)) != len(listed):
            raise PlacementError(f"node groups must be listed once each, got {', '.join(listed)}")
        return tuple(unit for label in listed for unit in self.units(label))

    @staticmethod
    def _hardware_units(group: NodeGroup, nodes: tuple[NodeInfo, ...]) -> tuple[Unit, ...]:
        units: list[Unit] = []
        for node in nodes:
            count = node.hardware.count(group.hardware or "")
            if not count:
                raise PlacementError(
                    f"node group {group.label}: every node must have hardware {group.hardware!r}, node {node.rank} has "
                    f"{list(node.hardware)}; remove the node or declare its hardware"
                )
            units.extend(Unit(node, index, group.label, group.hardware) for index in range(count))
        return tuple(units)
