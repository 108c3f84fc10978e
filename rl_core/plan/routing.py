"""Which env worker sends how many simulators' observations to which rollout, and how trajectories are cut for the data ranks. Pure.

`collective.routing` divides the rows of a batch between two groups in the same way.
"""

import math
from typing import NamedTuple


class Route(NamedTuple):
    """`size` consecutive simulators of one env worker, served by one rollout."""

    env: int
    rollout: int
    size: int


def shares(total: int, parts: int) -> list[int]:
    """Return `total` as `parts` sizes that differ by at most 1, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def routes(envs_per_worker: int, *, env_workers: int, rollouts: int, group: int = 1) -> list[Route]:
    """Return the routes in the order of the simulators. Simulators are numbered over the env workers, then cut among the rollouts.

    No group of `group` consecutive simulators is cut; it divides `envs_per_worker`. Raises ValueError when there are fewer groups than
    rollouts.
    """
    per_worker = envs_per_worker // group
    total = per_worker * env_workers
    if total < rollouts:
        description = "simulators" if group == 1 else f"groups of {group} simulators"
        raise ValueError(f"{description} must not be fewer than rollouts {rollouts}, got {total}; use fewer rollouts")
    result, begin = [], 0
    for rollout, size in enumerate(shares(total, rollouts)):
        end = begin + size
        for env in range(begin // per_worker, math.ceil(end / per_worker)):
            first, last = max(begin, env * per_worker), min(end, (env + 1) * per_worker)
            result.append(Route(env, rollout, (last - first) * group))
        begin = end
    return result


def trajectory_parts(senders: int, actors: int) -> int:
    """Return into how many parts each of `senders` trajectories is cut, so that all data ranks get equally many parts."""
    return math.lcm(senders, actors) // senders


def parts_of_rank(rank: int, *, senders: int, actors: int) -> list[tuple[int, int]]:
    """Return (sender, part) of each part on which the data rank `rank` trains.

    A sender is a stage of a rollout and has the number rollout index * stages + stage. `senders` and `actors` are the numbers of senders and
    of data ranks.
    """
    parts = trajectory_parts(senders, actors)
    pairs = [(sender, part) for sender in range(senders) for part in range(parts)]
    return [pair for pair in pairs if data_rank_of(*pair, senders=senders, actors=actors) == rank]


def data_rank_of(sender: int, part: int, *, senders: int, actors: int) -> int:
    """Return the data rank that trains a part of the trajectory of `sender`."""
    parts = trajectory_parts(senders, actors)
    return (sender * parts + part) * actors // (senders * parts)
