"""The order in which a ledger leases its prompts: one permutation per pass over a data set, seeded by (seed, data epoch).

index        place of a prompt in the data set, from 0; several data sets stand one behind the other
data epoch   number of the pass over the data set of the prompt, from 0
position     place in the ledger's order, from 0 without end
group id     `{prefix}{data epoch}-{index}`

Several data sets are interleaved by weight: among the first n positions, the number of each set differs from its share of n by less than
the number of sets. Each set has passes of its own, so that a small one with a large weight is repeated while a large one goes on.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol


class Part(NamedTuple):
    """One of several data sets that are mixed."""

    size: int
    """Number of its prompts."""
    weight: int
    """Its share relative to the other parts."""


def index_of(group_id: str) -> int:
    """Return the index of the prompt of a group id."""
    return int(group_id.rpartition("-")[2])


class Dataset(Protocol):
    """Prompts by index; a list will do. Implemented by rl_core.data.dataset.PromptDataset."""

    def __len__(self) -> int:
        """Return the number of prompts."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one prompt."""


class PromptOrder:
    """Maps positions of the ledger's order to prompts of the data sets `parts`."""

    def __init__(self, parts: Sequence[Part], *, seed: int, shuffle: bool, prefix: str = "") -> None:
        """`prefix` begins every group id. Without `shuffle`, each pass uses the order of the data set."""
        self._parts, self._seed, self._shuffle, self._prefix = tuple(parts), seed, shuffle, prefix
        self._starts = list(accumulate((part.size for part in parts), initial=0))
        self._permutations: dict[int, tuple[int, list[int]]] = {}
        self._credits = [0] * len(parts)
        self._places: list[tuple[int, int]] = []
        """Part and number within the part, by position; filled as far as it was asked for, and unused with one part."""
        self._positions: list[list[int]] = [[] for _ in parts]
        """The inverse of `_places`: positions by part and number within the part."""

    def index_at(self, position: int) -> int:
        """Return the index of the prompt at `position`."""
        part, number = self._place(position)
        data_epoch, offset = divmod(number, self._parts[part].size)
        return self._starts[part] + (self._permutation(part, data_epoch)[offset] if self._shuffle else offset)

    def group_id(self, position: int) -> str:
        """Return the group id of a position, `{data_epoch}-{index}`."""
        part, number = self._place(position)
        return f"{self._prefix}{number // self._parts[part].size}-{self.index_at(position)}"

    def position(self, group_id: str, *, end: int) -> int | None:
        """Return the position of a group id if it is below `end`, else None; also None for text that is no group id.

        Takes time proportional to the size of the data sets.
        """
        data_epoch, _, index = group_id.removeprefix(self._prefix).partition("-")
        if not data_epoch.isdecimal() or not index.isdecimal() or int(index) >= self._starts[-1]:
            return None
        part = next(part for part in range(len(self._parts)) if int(index) < self._starts[part + 1])
        size = self._parts[part].size
        for number in range(int(data_epoch) * size, (int(data_epoch) + 1) * size):
            position = self._position(part, number, end=end)
            if position is None:
                return None
            if self.group_id(position) == group_id:
                return position
        return None

    def _permutation(self, part: int, data_epoch: int) -> list[int]:
        """Return the order of pass `data_epoch` over a part."""
        kept = self._permutations.get(part)
        if kept is None or kept[0] != data_epoch:
            order = list(range(self._parts[part].size))
            seed = f"{self._seed}:{data_epoch}" if part == 0 else f"{self._seed}:{data_epoch}:{part}"
            random.Random(seed).shuffle(order)
            kept = self._permutations[part] = data_epoch, order
        return kept[1]

    def _place(self, position: int) -> tuple[int, int]:
        """Return (part, number within the part) of a position."""
        if len(self._parts) == 1:
            return 0, position
        self._interleave(position + 1)
        return self._places[position]

    def _position(self, part: int, number: int, *, end: int) -> int | None:
        """Return the position of the prompt `number` of a part; None where it is not below `end`."""
        if len(self._parts) == 1:
            return number if number < end else None
        self._interleave(end)
        positions = self._positions[part]
        return positions[number] if number < len(positions) and positions[number] < end else None

    def _interleave(self, end: int) -> None:
        """Fill the tables up to `end`. Each position gives every part its weight and goes to the part that has most, which pays for it.

        This is the smooth weighted round-robin of nginx, in integers: the same on every machine.
        """
        total = sum(part.weight for part in self._parts)
        while len(self._places) < end:
            for part, (_, weight) in enumerate(self._parts):
                self._credits[part] += weight
            chosen = max(range(len(self._parts)), key=self._credits.__getitem__)
            self._credits[chosen] -= total
            self._positions[chosen].append(len(self._places))
            self._places.append((chosen, len(self._positions[chosen]) - 1))
