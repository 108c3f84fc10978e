"""The groups that `placement.componentPlacement` names: keys of group names joined by commas."""

from collections.abc import Iterator, Sequence

from rl_core.api.bounds import listed
from rl_core.api.cel import Cel, literal
from rl_core.api.groups import GroupSpec
from rl_core.api.identity import ROLES
from rl_core.api.settings import PlacementSpec

PLACED = (
    "has(self.placement) && has(self.placement.componentPlacement) && self.placement.componentPlacement.exists(k, {})"
)
"""CEL of whether the written placement has a key `k` for which an expression holds."""
NUMBERED = PLACED.format("k.matches('(^|[ ,]){}([ ,]|$)')")
"""CEL of whether the written placement numbers the pods of a role."""
UNKNOWN = f"!k.split(',').all(n, n.trim() in {literal(list(ROLES))} || (has(self.groups) && self.groups.exists(g, g.name == n.trim())))"
PLACED_ARE_GROUPS = Cel(
    holds=f"!({PLACED.format(UNKNOWN)})",
    refusal="placement.componentPlacement must name groups of the job, got %s; correct them or declare the groups",
    values=(f"self.placement.componentPlacement.filter(k, {UNKNOWN})",),
    field="placement.componentPlacement",
)


def placed_groups(key: str) -> list[str]:
    """Return the names of the groups that a key of placement.componentPlacement joins by commas."""
    return [name.strip() for name in key.split(",")]


def unknown_placed(placement: PlacementSpec, groups: Sequence[GroupSpec]) -> Iterator[str]:
    """Yield the problem of a job whose placement has keys that do not name its groups."""
    known = {*ROLES, *(group.name for group in groups)}
    if unknown := [key for key in placement.component_placement if not set(placed_groups(key)) <= known]:
        yield (
            f"placement.componentPlacement must name groups of the job, got {listed(unknown)}; correct them or declare the groups"
        )
