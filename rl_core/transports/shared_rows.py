"""Large observations of one stage of a collection in shared memory: simulators write them, and the policy reads them in place.

A rollout allocates one segment for all arrays [R, B, ...], which have R rows of B simulators. Env workers on the same host map it by its name
in `ColumnAddress`. They pass a file descriptor of it to the processes of simulators, which do not see /dev/shm. Each simulator writes its own
column.
"""

import math
import mmap
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgpack
import numpy as np

from rl_core.api.errors import FrameError, InfrastructureError
from rl_core.transports import tokens
from rl_core.transports.links import ProcessSharedMemory
from rl_core.transports.shared_memory import LentMemory

ALIGNMENT = 64
"""Each array begins at a multiple of this number of bytes."""
FINAL_ROWS = 2
"""Number of rows that are reserved for the last observations of episodes, at the end of each array; see `final_row`."""
Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Type and shape of one simulator's array, by name."""
Allocate = Callable[[int], Awaitable[LentMemory | None]]
"""An asynchronous function that takes a number of bytes and returns shared memory of that size, or None if there is none to be had.

`Channel.allocate_async` is one.
"""


def final_row(row: int) -> int:
    """Return the row for the last observation of an episode that ends in the chunk of actions whose result is written to `row`.

    With auto-reset, `row` itself has the first observation of the next episode. Consecutive chunks have different final rows, because the
    rollout still reads that of one chunk while the simulators make the next one, which may end another episode.
    """
    return -1 - row % FINAL_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnAddress:
    """Where the arrays of a `SharedRows` lie, and the column of one simulator in them."""

    segment: str
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """(name, NumPy type, shape [R, B, ...], bytes before it) of each array."""
    column: int = 0

    def pack(self) -> np.ndarray:
        """Encode the address as a uint8 array, for messages that carry arrays only."""
        return np.frombuffer(msgpack.packb((self.segment, self.arrays, self.column)), np.uint8)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> Self:
        """Return the address that `pack` encoded."""
        segment, arrays, column = msgpack.unpackb(packed.tobytes())
        layouts = tuple((name, code, tuple(shape), begin) for name, code, shape, begin in arrays)
        return cls(segment=segment, arrays=layouts, column=column)

    def open(self) -> int:
        """Return a new descriptor of the segment. Raises InfrastructureError when its owner has removed it."""
        try:
            return tokens.open_own(tokens.DIRECTORY / self.segment, os.O_RDWR)
        except OSError as error:
            raise InfrastructureError(f"segment {self.segment} cannot be opened; its owner may be gone") from error

    def map(self, descriptor: int | None = None) -> dict[str, np.ndarray]:
        """Return the simulator's arrays [R, ...] by name. `descriptor` is one of the segment; None maps it by its name.

        Raises InfrastructureError when its owner has removed it.
        """
        try:
            memory: Any = (
                ProcessSharedMemory.shared().reader.view(self.segment, 0, self.size)
                if descriptor is None
                else mmap.mmap(descriptor, self.size)
            )
        except FrameError as error:
            raise InfrastructureError(str(error)) from error
        return {name: array[:, self.column] for name, array in self.view(memory).items()}

    def view(self, memory: Any) -> dict[str, np.ndarray]:
        """Return a dict from name to the whole array [R, B, ...] in `memory`, the mapped segment."""
        return {
            name: np.frombuffer(memory, code, math.prod(shape), begin).reshape(shape)
            for name, code, shape, begin in self.arrays
        }

    @property
    def size(self) -> int:
        """Number of bytes that the arrays occupy in the segment."""
        return max(begin + math.prod(shape) * np.dtype(code).itemsize for _, code, shape, begin in self.arrays)


class SharedRows:
    """Arrays [R, B, ...] in shared memory for the observations of B simulators. The rollout creates and reads them.

    R is the number of outputs of a simulator in a collection, and FINAL_ROWS more.
    """

    def __init__(self, address: ColumnAddress, lent: LentMemory) -> None:
        """Use `allocate` to create one. The arrays of `address` lie in `lent`."""
        self.address, self.lent = address, lent
        self.arrays = address.view(lent.memory)
        """Name -> array [R, B, ...]."""

    @classmethod
    async def allocate(cls, allocate: Allocate, layout: Layout, *, rows: int, columns: int) -> Self | None:
        """Return arrays [rows, columns, ...], one for each entry of `layout`, in memory that the argument `allocate` returns.

        `rows` includes FINAL_ROWS. The contents are arbitrary. Returns None if `allocate` does. The caller must release the attribute `lent`
        of the result.
        """
        arrays, size = [], 0
        for name, (dtype, shape) in layout.items():
            arrays.append((name, dtype.str, (rows, columns, *shape), size))
            size += -(-rows * columns * math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        lent = await allocate(size)
        return None if lent is None else cls(ColumnAddress(segment=lent.loan.segment, arrays=tuple(arrays)), lent)
