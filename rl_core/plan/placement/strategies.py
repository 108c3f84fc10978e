"""Placement strategies, which turn resources into one Placement per process."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from rl_core.api.errors import PlacementError, PlacementRangeError
from rl_core.plan.placement.inventory import ACCELERATOR, CLUSTER, NODE, Inventory, Unit
from rl_core.plan.placement.placement import Placement

Labels = str | Sequence[str] | None
"""One label, `a,b`, or a sequence of labels; None = the strategy's default group."""


class PlacementStrategy(ABC):
    """Turns an inventory into the Placements of one group of processes."""

    @abstractmethod
    def get_placement(self, inventory: Inventory, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one Placement per process, by rank. Raises PlacementError where the inventory does not fit."""


class FlexiblePlacementStrategy(PlacementStrategy):
    """Each process has an explicit list of resource ranks. Processes may share resources; the ranks of one process are unique."""

    def __init__(self, hardware_ranks_list: Sequence[Sequence[int]], node_group_label: Labels = None) -> None:
        if not hardware_ranks_list or not all(hardware_ranks_list):
            raise PlacementError(
                f"hardware_ranks_list must not be empty, nor any process in it, got {hardware_ranks_list}"
            )
        for ranks in hardware_ranks_list:
            if len(set(ranks)) != len(ranks):
                raise PlacementError(f"hardware ranks of one process must be unique, got {list(ranks)}")
        self.hardware_ranks_list = sorted((sorted(ranks) for ranks in hardware_ranks_list), key=lambda ranks: ranks[0])
        self.node_group_labels = split_labels(node_group_label, default=CLUSTER)

    def get_placement(self, inventory: Inventory, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one Placement per process, ordered by first resource rank."""
        units = inventory.units_of(self.node_group_labels)
        units_by_process = [[_unit(units, rank) for rank in ranks] for ranks in self.hardware_ranks_list]
        for process, members in enumerate(units_by_process):
            _check_one_node(process, self.hardware_ranks_list[process], members)
        return _place(units_by_process, isolate_accelerator)


class PackedPlacementStrategy(PlacementStrategy):
    """Processes of `num_hardware_per_process` resources each, `stride` apart, over start..end inclusive.

    Raises PlacementError when the number of resources is not a multiple of num_hardware_per_process * stride; whether
    they exist is checked in get_placement. 12 resources, n 3, stride 2: [0,2,4] [1,3,5] [6,8,10] [7,9,11].
    """

    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: Labels = None,
    ) -> None:
        count = end_hardware_rank - start_hardware_rank + 1
        if start_hardware_rank < 0 or count < 1:
            raise PlacementError(
                f"hardware ranks must satisfy 0 <= start <= end, got {start_hardware_rank} and {end_hardware_rank}"
            )
        if num_hardware_per_process < 1 or stride < 1:
            raise PlacementError(
                f"num_hardware_per_process and stride must be at least 1, got {num_hardware_per_process} and {stride}"
            )
        if count % (num_hardware_per_process * stride):
            raise PlacementError(
                f"num_hardware_per_process {num_hardware_per_process} x stride {stride} must divide the {count} resources "
                f"{start_hardware_rank}-{end_hardware_rank}"
            )
        self.start_hardware_rank = start_hardware_rank
        self.end_hardware_rank = end_hardware_rank
        self.num_hardware_per_process = num_hardware_per_process
        self.stride = stride
        self.node_group_labels = split_labels(node_group, default=CLUSTER)

    @property
    def hardware_ranks_list(self) -> list[list[int]]:
        """Return the resource ranks of each process: the lowest unused one, then `stride` apart."""
        block = self.num_hardware_per_process * self.stride
        return [
            [start + offset + index * self.stride for index in range(self.num_hardware_per_process)]
            for start in range(self.start_hardware_rank, self.end_hardware_rank + 1, block)
            for offset in range(self.stride)
        ]

    def get_placement(self, inventory: Inventory, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one Placement per process."""
        flexible = FlexiblePlacementStrategy(self.hardware_ranks_list, self.node_group_labels)
        return flexible.get_placement(inventory, isolate_accelerator)


class NodePlacementStrategy(PlacementStrategy):
    """One process for each listed node rank; a rank that is listed again gets another process. Each sees all accelerators of its node."""

    def __init__(self, node_ranks: Sequence[int], node_group_label: Labels = None) -> None:
        if not node_ranks:
            raise PlacementError("node_ranks must not be empty")
        self.node_ranks = sorted(node_ranks)
        self.node_group_labels = split_labels(node_group_label, default=NODE)

    def get_placement(self, inventory: Inventory, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one Placement per process. Raises PlacementError when groups overlap, PlacementRangeError outside."""
        nodes = [(node, label) for label in self.node_group_labels for node in inventory.nodes_of(label)]
        repeated = [rank for rank, count in Counter(node.rank for node, _ in nodes).items() if count > 1]
        if repeated:
            raise PlacementError(
                f"node groups {', '.join(self.node_group_labels)} must not overlap, got nodes {repeated} in more than one"
            )
        units = tuple(Unit(node, 0, label, None) for node, label in nodes)
        return _place([[_unit(units, rank)] for rank in self.node_ranks], isolate_accelerator)


def split_labels(labels: Labels, *, default: str) -> tuple[str, ...]:
    """Return the labels of `a,b`, a sequence, or None (the default)."""
    if labels is None:
        return (default,)
    listed: Iterable[str] = labels.split(",") if isinstance(labels, str) else labels
    result = tuple(label.strip() for label in listed if label.strip())
    if not result:
        raise PlacementError(f"node group label must not be empty, got {labels!r}; remove it for {default}")
    return result


def _unit(units: Sequence[Unit], rank: int) -> Unit:
    if not 0 <= rank < len(units):
        raise PlacementRangeError(f"resource rank {rank} is out of range [0, {len(units) - 1}] (total {len(units)})")
    return units[rank]


def _check_one_node(process: int, ranks: Sequence[int], units: Sequence[Unit]) -> None:
    nodes = sorted({unit.node.rank for unit in units})
    if len(nodes) > 1:
        raise PlacementError(
            f"resources {list(ranks)} of process {process} must be on the same node, got nodes {nodes}; "
            "choose ranks of one node or fewer resources per process"
        )
    kinds = sorted({str(unit.kind) for unit in units})
    if len(kinds) > 1:
        raise PlacementError(
            f"resources {list(ranks)} of process {process} must be of one type, got {', '.join(kinds)}"
        )


def _place(units_by_process: Sequence[Sequence[Unit]], isolate: bool) -> list[Placement]:
    """Return the Placements of processes given their units, each process on one node."""
    node_of = [units[0].node.rank for units in units_by_process]
    node_index = {node: index for index, node in enumerate(dict.fromkeys(node_of))}
    sizes, num_on_node = Counter(node_of), Counter[int]()
    placements = []
    for rank, units in enumerate(units_by_process):
        node, kind = units[0].node, units[0].kind
        local_ranks = [unit.local_rank for unit in units] if kind is not None else []
        visible = local_ranks if isolate and kind == ACCELERATOR else list(node.accelerator_numbers)
        placements.append(
            Placement(
                rank=rank,
                cluster_node_rank=node.rank,
                placement_node_rank=node_index[node.rank],
                local_rank=num_on_node[node.rank],
                local_world_size=sizes[node.rank],
                accelerator_type=node.accelerator_type,
                visible_accelerators=[str(number) for number in visible],
                local_accelerator_rank=visible[0] if visible else -1,
                local_hardware_ranks=local_ranks,
                node_group_label=units[0].label,
                isolate_accelerator=isolate,
            )
        )
        num_on_node[node.rank] += 1
    return placements
