"""Colocated, disaggregated and hybrid layouts of model-parallel components."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rl_core.api.errors import PlacementError
from rl_core.plan.placement.component import ALIASES, Component, ComponentPlacement
from rl_core.plan.placement.inventory import NODE, Inventory
from rl_core.plan.placement.strategies import PackedPlacementStrategy

_EXCLUSIVE = ("actor", "inference", "critic", "critic_inference", "rollout")
"""Components that run the model; the mode disaggregated gives each of them its own accelerators, in this order."""
_DEDICATED = ("inference", "critic_inference")
_SIZES = ("tensor", "pipeline", "context")


class PlacementMode(StrEnum):
    """How the model-parallel components share accelerators."""

    COLLOCATED = "colocated"
    """Actor and rollout use the same accelerators, one after the other."""
    DISAGGREGATED = "disaggregated"
    """Each component has its own accelerators."""
    HYBRID = "hybrid"
    """The placement as written, without rules about sharing."""


@dataclass(frozen=True, slots=True)
class RoleParallel:
    """The parallel sizes of one component."""

    world: int
    """Accelerators (processes on CPU)."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def unit(self) -> int:
        """Number of ranks of one model replica: tensor x pipeline x context size."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Number of model replicas: the data-parallel size."""
        return self.world // self.unit


class ModelParallelComponentPlacement(ComponentPlacement):
    """Components `actor` and `rollout`, optionally `inference` (alias `actor_inference`), `critic`, `critic_inference`, `reward`.

    `parallelism` is {component: {"tensor", "pipeline", "context"}}, absent sizes 1. `
    .mode` is derived from the sets of resources and compared
    with the mode in `config`, if that has one. Strategies of model-parallel components on hardware are packed: one process
    per accelerator, one per engine for the rollout. Without `componentPlacement`, the mode in `config` determines the layout.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        inventory: Inventory,
        parallelism: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._sizes = _parallel_sizes(parallelism or {})
        self._given_mode = _written_mode(config.get("mode"))
        super().__init__(config, inventory)
        for name in ("actor", "rollout"):
            self._component(name)
        if "inference" in self._components and not config.get("recomputeLogProbs"):
            raise PlacementError(
                "component inference: needs algorithm.recomputeLogProbs true, got false; set it or remove the component"
            )
        self._models = {name: self._components[name] for name in _EXCLUSIVE if name in self._components}
        for component in self._models.values():
            _check_contiguous(component)
        hybrid = self._given_mode is PlacementMode.HYBRID
        self.mode = PlacementMode.HYBRID if hybrid else self._derive_mode()
        self._parallel = {name: self._check_sizes(component) for name, component in self._models.items()}
        if not hybrid:
            self._pack()

    def get_parallel(self, name: str) -> RoleParallel:
        """Return the parallel sizes of a model-parallel component."""
        name = ALIASES.get(name, name)
        if name not in self._parallel:
            raise PlacementError(f"component {name!r} must be one of {', '.join(self._parallel)}")
        return self._parallel[name]

    def get_world_size(self, name: str) -> int:
        """Return the number of processes its strategy makes."""
        strategy = self._component(name).strategy
        if isinstance(strategy, PackedPlacementStrategy):
            return len(strategy.hardware_ranks_list)
        return super().get_world_size(name)

    def _placement_map(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("componentPlacement"):
            return super()._placement_map(config)
        if self._given_mode in (None, PlacementMode.HYBRID):
            raise PlacementError(
                f"componentPlacement must be given with mode {self._given_mode}; write it, or mode disaggregated"
            )
        return self._default_layout(len(self.inventory.units("cluster")))

    def _default_layout(self, total: int) -> dict[str, Any]:
        """Return the same accelerators for all components (colocated), or consecutive blocks of about equal size, with the rest for the rollout."""
        node_components: dict[str, Any] = {"env,reward": {"node_group": NODE, "placement": "all"}}
        if self._given_mode is PlacementMode.COLLOCATED:
            return {"actor,rollout": "all"} | node_components
        names = [name for name in _EXCLUSIVE if name in self._sizes or name in ("actor", "rollout")]
        layout: dict[str, Any] = {}
        start = 0
        for position, name in enumerate(names):
            unit = RoleParallel(1, **self._sizes.get(name, {})).unit
            num_available = total - start if name == "rollout" else (total - start) // (len(names) - position)
            size = num_available // unit * unit
            if not size and total - start >= unit:
                size = unit
            if not size:
                raise PlacementError(
                    f"component {name}: {unit} resources must be left for one replica, got {total - start} of {total}; "
                    "add resources or write componentPlacement"
                )
            layout[name] = f"{start}-{start + size - 1}"
            start += size
        return layout | node_components

    def _derive_mode(self) -> PlacementMode:
        sets = {name: {unit.identity for unit in component.units} for name, component in self._models.items()}
        quoted = "; ".join(f"{name} {component.resources}" for name, component in self._models.items())
        if sets["actor"] == sets["rollout"]:
            derived = PlacementMode.COLLOCATED
        elif sum(map(len, sets.values())) == len(set().union(*sets.values())):
            derived = PlacementMode.DISAGGREGATED
        else:
            raise PlacementError(
                f"components must have equal sets (colocated) or disjoint sets (disaggregated) of resources, got {quoted}; "
                "change them or write mode: hybrid"
            )
        if self._given_mode not in (None, derived):
            raise PlacementError(
                f"mode must be {derived} for these sets, got {self._given_mode} with {quoted}; change one of them"
            )
        dedicated = [name for name in _DEDICATED if name in sets]
        if derived is PlacementMode.COLLOCATED and dedicated:
            raise PlacementError(
                f"component {dedicated[0]}: colocated mode has no dedicated inference, got {quoted}; remove it"
            )
        return derived

    def _check_sizes(self, component: Component) -> RoleParallel:
        world = len(component.resources) if component.on_hardware else component.num_processes
        parallel = RoleParallel(world, **self._sizes.get(component.name, {}))
        if parallel.tensor > world:
            raise PlacementError(
                f"component {component.name}: tensor {parallel.tensor} must be at most its world {world}; lower it"
            )
        if world % parallel.unit:
            raise PlacementError(
                f"component {component.name}: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} "
                f"must divide its world {world}; change the sizes or the resources"
            )
        return parallel

    def _pack(self) -> None:
        """Replace the strategies of components on hardware by packed ones."""
        for name, component in self._models.items():
            if component.on_hardware:
                per_process, stride = self._engine_shape() if name == "rollout" else (1, 1)
                self._components[name] = _packed(component, per_process, stride, self.inventory)

    def _engine_shape(self) -> tuple[int, int]:
        """Return the number of accelerators of one engine and their stride.

        In the mode colocated each engine rank shares an accelerator with the actor rank that
        holds the same slice of the model."""
        engine, actor = self._parallel["rollout"], self._parallel["actor"].tensor
        if self.mode is PlacementMode.COLLOCATED and engine.unit == engine.tensor and actor % engine.unit == 0:
            return engine.unit, actor // engine.unit
        return engine.unit, 1


def _check_contiguous(component: Component) -> None:
    ranks = component.resources
    if ranks != list(range(ranks[0], ranks[-1] + 1)):
        raise PlacementError(
            f"component {component.name}: resource ranks must be contiguous, got {ranks}; close the gaps"
        )


def _packed(component: Component, per_process: int, stride: int, inventory: Inventory) -> Component:
    """Return the component with processes of `per_process` resources, `stride` apart."""
    ranks = component.resources
    num_processes = len(ranks) // per_process
    if component.num_processes not in (len(ranks), num_processes):
        raise PlacementError(
            f"component {component.name}: {len(ranks)} resources make {num_processes} processes of {per_process}, "
            f"got {component.num_processes} processes written; leave the process ranks out"
        )
    strategy = PackedPlacementStrategy(ranks[0], ranks[-1], per_process, stride, component.labels)
    try:
        strategy.get_placement(inventory)
    except PlacementError as error:
        raise type(error)(f"component {component.name}: {error}") from error
    return replace(component, strategy=strategy)


def _written_mode(mode: Any) -> PlacementMode | None:
    if mode is None:
        return None
    try:
        return PlacementMode(mode)
    except ValueError as error:
        raise PlacementError(f"mode must be one of {', '.join(PlacementMode)}, got {mode!r}") from error


def _parallel_sizes(parallelism: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    sizes_by_component: dict[str, dict[str, int]] = {}
    for name, sizes in parallelism.items():
        invalid = {key: value for key, value in sizes.items() if key not in _SIZES or value < 1}
        if invalid:
            raise PlacementError(f"parallelism of {name} must have sizes >= 1 under {', '.join(_SIZES)}, got {invalid}")
        sizes_by_component[ALIASES.get(name, name)] = dict(sizes)
    return sizes_by_component
