"""Which actor rank sends its slice of the weights to which rank of which rollout engine."""

from rl_core.api.errors import PlacementError


def rank_map(actor_tp: int, actor_world: int, rollout_tp: int, rollout_world: int) -> dict[int, list[tuple[int, int]]]:
    """Return, for each actor rank, the (engine, tensor-parallel rank) pairs it is the source of; empty for idle ranks.

    With k = actor_tp / rollout_tp and G = actor_world / actor_tp, the source of (d, r) is ((d // k) % G) * actor_tp + r * k
    + d % k; for actor_tp 1 it is (d * rollout_tp + r) % actor_world. Every pair has exactly one source, also where the
    engines are not a multiple of k * G. Raises PlacementError for sizes that are not of this form.
    """
    sizes = f"actor_tp {actor_tp}, actor_world {actor_world}, rollout_tp {rollout_tp}, rollout_world {rollout_world}"
    if min(actor_tp, actor_world, rollout_tp, rollout_world) < 1:
        raise PlacementError(f"sizes must be at least 1, got {sizes}")
    if actor_world % actor_tp or rollout_world % rollout_tp:
        raise PlacementError(f"tensor-parallel sizes must divide their worlds, got {sizes}")
    if actor_tp != 1 and actor_tp % rollout_tp:
        raise PlacementError(f"actor_tp must be 1 or a multiple of rollout_tp, got {sizes}; change rollout_tp")
    ratio, replicas = actor_tp // rollout_tp, actor_world // actor_tp
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(actor_world)}
    for engine in range(rollout_world // rollout_tp):
        for slice_rank in range(rollout_tp):
            if actor_tp == 1:
                source = (engine * rollout_tp + slice_rank) % actor_world
            else:
                source = (engine // ratio) % replicas * actor_tp + slice_rank * ratio + engine % ratio
            found[source].append((engine, slice_rank))
    return found
