"""Plans which rows form an optimizer step and which rank trains them. Pure, and equal on all ranks without communication.

The rows of a step are divided into mini-batches before they are assigned to ranks, so the number of ranks does not change which rows form
an optimizer step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.batching.balance import karmarkar_karp, load_ratio, sequence_costs, split_evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlan:
    """The plan of one pass over the rows of a step. It has nothing to do with the job's epoch."""

    minibatches: list[list[list[int]]]
    """[mini-batch][rank] -> row numbers, ascending."""
    destination: list[int]
    """Rank that trains each row."""
    imbalance: float
    """Largest cost of a rank over the mean cost, for the whole pass."""


def plan_pass(
    lengths: Sequence[int],
    *,
    minibatches: int,
    ranks: int,
    hidden_size: int,
    balance: bool,
    seed: Sequence[int],
) -> PassPlan:
    """Return the plan of one pass over rows of `lengths` tokens.

    - `minibatches`: number of optimizer steps in the pass. With more than one, rows are shuffled. If there are fewer rows, the last
      mini-batches are empty.
    - `ranks`: number of data ranks.
    - `hidden_size`: of the model; it determines the cost of a row.
    - `balance`: assign rows to ranks so that costs are equal; otherwise in order.
    - `seed`: seed of the shuffle: the run's seed, the step and the number of the pass.
    """
    order = np.arange(len(lengths))
    if minibatches > 1:
        order = np.random.default_rng(list(seed)).permutation(len(lengths))
    batches = [np.sort(batch).tolist() for batch in np.array_split(order, minibatches)]
    if ranks == 1:
        return PassPlan(minibatches=[[batch] for batch in batches], destination=[0] * len(lengths), imbalance=1.0)
    costs = sequence_costs(lengths, linear=1.0, quadratic=1.0 / (12 * hidden_size))
    assignments = [_deal(batch, costs, ranks, balance) for batch in batches]
    destination = np.zeros(len(lengths), np.int64)
    for assignment in assignments:
        for rank, rows in enumerate(assignment):
            destination[rows] = rank
    loads = [np.flatnonzero(destination == rank).tolist() for rank in range(ranks)]
    imbalance = load_ratio(costs, loads) if lengths else 1.0
    return PassPlan(minibatches=assignments, destination=destination.tolist(), imbalance=imbalance)


def _deal(rows: list[int], costs: Sequence[float], ranks: int, balance: bool) -> list[list[int]]:
    if not balance:
        return [list(indices) for indices in split_evenly(rows, ranks)]
    # Rank 0 gets the heaviest set of each mini-batch. This costs nothing, because ranks wait for each other at the end of each mini-batch.
    return [sorted(rows[index] for index in indices) for indices in karmarkar_karp([costs[row] for row in rows], ranks)]
