"""Placement: which process runs on which node with which accelerators. Pure and torch-free.

`inventory` says what there is, `grammar` reads the map a user writes, `strategies` turn resources into Placements (`placement`),
`component` binds components to strategies, `modes` checks and derives colocated and disaggregated layouts.
"""

from rl_core.plan.placement.component import ComponentPlacement, HybridComponentPlacement
from rl_core.plan.placement.grammar import PlacementPart, parse_placement, parse_ranks
from rl_core.plan.placement.inventory import Inventory, NodeGroup, NodeInfo
from rl_core.plan.placement.modes import ModelParallelComponentPlacement, PlacementMode
from rl_core.plan.placement.placement import Placement
from rl_core.plan.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)

__all__ = [
    "ComponentPlacement",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "Inventory",
    "ModelParallelComponentPlacement",
    "NodeGroup",
    "NodeInfo",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementMode",
    "PlacementPart",
    "PlacementStrategy",
    "parse_placement",
    "parse_ranks",
]
