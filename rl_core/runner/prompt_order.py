"""The order in which a ledger leases its prompts: one permutation per pass over a data set, seeded by (seed, data epoch).

index        place of a prompt in the data set, from 0; several data sets stand one behind the other
data epoch   number of the pass over the data set of the prompt, from 0
position     place in the ledger's order, from 0 without end
group id     `{prefix}{data epoch}-{index}`

Several data sets are interleaved by weight: among the first n positions, the number of each set differs from its share of n by less than
the number of sets. Each set has passes of its own, so that a small one with a large weight is repeated while a large one goes on.
"""

import random
from bisect import bisect_right
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
        self._remaining_weights = list(accumulate((part.weight for part in reversed(parts)), initial=0))[:0:-1]
        """Sum of the weights of each part and those behind it."""
        self._permutations: dict[int, tuple[int, list[int]]] = {}
        """The newest data epoch that was asked for and its order, by part."""

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

        Takes time proportional to the size of the data set.
        """
        data_epoch, _, text = group_id.removeprefix(self._prefix).partition("-")
        if not data_epoch.isdecimal() or not text.isdecimal() or int(text) >= self._starts[-1]:
            return None
        part = bisect_right(self._starts, int(text)) - 1
        size, offset = self._parts[part].size, int(text) - self._starts[part]
        position = self._position(part, int(data_epoch) * size)
        if position >= end:
            return None  # The order of a pass that has not begun is not computed.
        if self._shuffle:
            offset = self._permutation(part, int(data_epoch)).index(offset)
        position = self._position(part, int(data_epoch) * size + offset)
        return position if position < end and self.group_id(position) == group_id else None

    def _permutation(self, part: int, data_epoch: int) -> list[int]:
        """Return the order of pass `data_epoch` over a part."""
        cached = self._permutations.get(part)
        if cached is None or cached[0] != data_epoch:
            order = list(range(self._parts[part].size))
            seed = f"{self._seed}:{data_epoch}" if part == 0 else f"{self._seed}:{data_epoch}:{part}"
            random.Random(seed).shuffle(order)
            cached = self._permutations[part] = data_epoch, order
        return cached[1]

    def _place(self, position: int) -> tuple[int, int]:
        """Return (part, number within the part) of a position.

        Of the first n positions the first part gets floor(n w / W), where w is its weight and W the sum of all; what is left is divided among
        the further parts in the same way. Only integers are used, so that the result is the same on every machine.
        """
        for part, ((_, weight), total) in enumerate(zip(self._parts, self._remaining_weights, strict=True)):
            start, stop = position * weight // total, (position + 1) * weight // total
            if stop > start:
                return part, start
            position -= start
        raise AssertionError("the last part gets all that is left")

    def _position(self, part: int, number: int) -> int:
        """Return the position of prompt `number` of a part, the inverse of `_place`."""
        weight, total = self._parts[part].weight, self._remaining_weights[part]
        position = -(-(number + 1) * total // weight) - 1
        for earlier in range(part - 1, -1, -1):
            position = position * self._remaining_weights[earlier] // self._remaining_weights[earlier + 1]
        return position
