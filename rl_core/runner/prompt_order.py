"""The order in which a ledger leases its prompts: one permutation per pass over the data set, seeded by (seed, data epoch).

index        place of a prompt in the data set, from 0
data epoch   number of the pass over the data set, from 0
position     place in the ledger's order, from 0 without end; the data epoch is position // size
group id     `{prefix}{data epoch}-{index}`
"""

import random
from typing import Any, Protocol


class Dataset(Protocol):
    """Prompts by index; a list will do. Implemented by rl_core.data.dataset.PromptDataset."""

    def __len__(self) -> int:
        """Return the number of prompts."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one prompt."""


class PromptOrder:
    """Maps positions of the ledger's order to prompts of a data set of `size` prompts."""

    def __init__(self, size: int, *, seed: int, shuffle: bool, prefix: str = "") -> None:
        """`prefix` begins every group id. Without `shuffle`, each pass uses the order of the data set."""
        self._size, self._seed, self._shuffle, self._prefix = size, seed, shuffle, prefix
        self._permutation: tuple[int, list[int]] = (-1, [])

    def index_at(self, position: int) -> int:
        """Return the index in the data set of the prompt at `position`."""
        data_epoch, offset = divmod(position, self._size)
        if not self._shuffle:
            return offset
        if self._permutation[0] != data_epoch:
            order = list(range(self._size))
            random.Random(f"{self._seed}:{data_epoch}").shuffle(order)
            self._permutation = (data_epoch, order)
        return self._permutation[1][offset]

    def group_id(self, position: int) -> str:
        """Return the group id of a position, `{data_epoch}-{index}`."""
        return f"{self._prefix}{position // self._size}-{self.index_at(position)}"

    def position(self, group_id: str, *, end: int) -> int | None:
        """Return the position of a group id if it is below `end`, else None; also None for text that is no group id.

        Takes time proportional to the size of the data set.
        """
        data_epoch, _, _ = group_id.removeprefix(self._prefix).partition("-")
        if not data_epoch.isdecimal():
            return None
        start = int(data_epoch) * self._size
        positions = range(start, min(start + self._size, end))
        return next((position for position in positions if self.group_id(position) == group_id), None)
