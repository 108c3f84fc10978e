"""Components of a job and their placement strategies, from the `componentPlacement` map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.api.errors import PlacementError
from rl_core.plan.placement.grammar import PlacementPart, as_text, parse_placement, parse_ranks
from rl_core.plan.placement.inventory import CLUSTER, Inventory, NodeGroup, Unit
from rl_core.plan.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementStrategy,
    split_labels,
)

ALIASES = {"actor_inference": "inference"}
_CONFIG_KEYS = frozenset({"componentPlacement", "mode", "nodeGroups", "recomputeLogProbs"})
_GROUP_KEYS = {
    "label": "label",
    "nodeRanks": "node_ranks",
    "env": "env",
    "interpreter": "interpreter",
    "hardware": "hardware",
    "ignoreHardware": "ignore_hardware",
}


@dataclass(frozen=True, slots=True)
class Component:
    """One component: its entry in the map, and its strategy."""

    name: str
    labels: tuple[str, ...]
    """Node groups whose units its resource ranks count, in order."""
    parts: tuple[PlacementPart, ...]
    units: tuple[Unit, ...]
    """The units of its resource ranks, in order."""
    strategy: PlacementStrategy

    @property
    def resources(self) -> list[int]:
        """Return its resource ranks, ascending."""
        return [rank for part in self.parts for rank in part.resources]

    @property
    def num_processes(self) -> int:
        """Number of processes in its entry of the map; a packed strategy of `modes` may create another number (`get_world_size`)."""
        return sum(len(part.processes) for part in self.parts)

    @property
    def on_hardware(self) -> bool:
        """Return whether its resources are accelerators or other hardware, not whole nodes."""
        return self.units[0].kind is not None


class ComponentPlacement:
    """The strategies of all components.

    `config` is `{"componentPlacement": {"name[,name]": map | {"node_group": labels, "placement": map}}, "nodeGroups": [...],
    "mode": ..., "recomputeLogProbs": ...}`; every placement is worked out at construction. Raises PlacementError naming the
    component, the part, the rule and the total.
    """

    def __init__(self, config: Mapping[str, Any], inventory: Inventory) -> None:
        unknown = sorted(map(str, set(config) - _CONFIG_KEYS))
        if unknown:
            raise PlacementError(f"placement config must have keys of {sorted(_CONFIG_KEYS)}, got {', '.join(unknown)}")
        self.inventory = _with_groups(inventory, config.get("nodeGroups") or ())
        self._components: dict[str, Component] = {}
        for key, value in self._placement_map(config).items():
            given_names = [name.strip() for name in str(key).split(",") if name.strip()]
            names = [ALIASES.get(name, name) for name in given_names]
            if not names:
                raise PlacementError(f"componentPlacement key must name components, got {key!r}")
            self._add(names, value)

    @property
    def components(self) -> list[str]:
        """Return the names of all components, in the order written."""
        return list(self._components)

    def get_strategy(self, name: str) -> PlacementStrategy:
        """Return the strategy of a component; names written together share one object."""
        return self._component(name).strategy

    def get_world_size(self, name: str) -> int:
        """Return the number of processes of a component."""
        return self._component(name).num_processes

    def get_hardware_ranks(self, name: str) -> list[int]:
        """Return the resource ranks of a component in its node groups, ascending."""
        return self._component(name).resources

    def _placement_map(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        placement_map = config.get("componentPlacement")
        if not isinstance(placement_map, Mapping) or not placement_map:
            raise PlacementError(
                f"componentPlacement must map components to placements, got {placement_map!r}; write `actor: 0-3`"
            )
        return placement_map

    def _component(self, name: str) -> Component:
        name = ALIASES.get(name, name)
        if name not in self._components:
            raise PlacementError(
                f"component {name!r} must be one of {', '.join(self._components)}; add it to componentPlacement"
            )
        return self._components[name]

    def _add(self, names: Sequence[str], value: Any) -> None:
        repeated = [name for name in names if name in self._components] or [n for n in names if names.count(n) > 1]
        if repeated:
            raise PlacementError(
                f"component {repeated[0]}: names must be unique in componentPlacement (actor_inference is an alias of inference); remove one"
            )
        try:
            component = self._parse(names[0], value)
            component.strategy.get_placement(self.inventory)
        except PlacementError as error:
            raise type(error)(f"component {', '.join(names)}: {error}") from error
        self._components |= {name: replace(component, name=name) for name in names}

    def _parse(self, name: str, value: Any) -> Component:
        labels: tuple[str, ...] = (CLUSTER,)
        if isinstance(value, Mapping):
            if not {"placement"} <= set(value) <= {"node_group", "placement"}:
                raise PlacementError(f"a placement must have placement and may have node_group, got {list(value)}")
            node_group = value.get("node_group")
            labels = split_labels(None if node_group is None else as_text(node_group), default=CLUSTER)
            value = value["placement"]
        units = self.inventory.units_of(labels)
        parts = tuple(parse_placement(value, len(units)))
        assigned = [ranks for part in parts for _, ranks in part.assignments()]
        selected_units = tuple(units[rank] for part in parts for rank in part.resources)
        return Component(name, labels, parts, selected_units, _strategy(labels, units, assigned))


class HybridComponentPlacement(ComponentPlacement):
    """A placement without rules about which components may share resources (mode hybrid)."""


def _strategy(labels: tuple[str, ...], units: Sequence[Unit], assigned: list[tuple[int, ...]]) -> PlacementStrategy:
    """Return the strategy for processes on hardware, or on whole nodes where the groups have none."""
    on_hardware = {unit.kind is not None for unit in units}
    if len(on_hardware) > 1:
        raise PlacementError(
            f"node groups {', '.join(labels)} must all have hardware or all have none; split the component"
        )
    if on_hardware == {True}:
        return FlexiblePlacementStrategy(assigned, labels)
    for process, ranks in enumerate(assigned):
        if len(ranks) > 1:
            raise PlacementError(
                f"process {process} must be on the same node, got nodes {list(ranks)}; give it one node, or more processes"
            )
    return NodePlacementStrategy([ranks[0] for ranks in assigned], labels)


def _with_groups(inventory: Inventory, node_groups: Any) -> Inventory:
    if not isinstance(node_groups, list | tuple):
        raise PlacementError(f"nodeGroups must be a list of node groups, got {node_groups!r}; write `- label: NAME`")
    groups: list[NodeGroup] = []
    for item in node_groups:
        if isinstance(item, NodeGroup):
            groups.append(item)
            continue
        if not isinstance(item, Mapping) or not {"label", "nodeRanks"} <= set(item) <= set(_GROUP_KEYS):
            raise PlacementError(
                f"a node group must have label and nodeRanks and keys of {list(_GROUP_KEYS)}, got {item!r}"
            )
        fields = {_GROUP_KEYS[key]: value for key, value in item.items()}
        fields["node_ranks"] = parse_ranks(item["nodeRanks"], len(inventory.nodes))
        groups.append(NodeGroup(**fields))
    return Inventory(inventory.nodes, (*inventory.groups, *groups)) if groups else inventory
