"""How an item travels to and from the channel server: its parts inline, or in segments the server owns.

A part on the wire is `bytes` (small), a uint8 array (large, by socket) or `[segment, generation, nbytes]`. The server
never decodes a payload. Used by `client` and `server`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_core.api.errors import FrameError
from rl_core.transports import frames, shared_memory
from rl_core.transports.codec import LARGE_BYTES
from rl_core.transports.shared_memory import Placement

Part = bytes | np.ndarray | list[Any]


def inline(part: Any) -> Part:
    """Return a part that travels by socket."""
    view = memoryview(part).cast("B")
    return bytes(view) if view.nbytes < LARGE_BYTES else np.frombuffer(view, np.uint8)


def worth_a_segment(part: Any) -> bool:
    """Return whether a part should go through shared memory where it can."""
    return needs_segment(memoryview(part).nbytes)


def size(part: Any) -> int:
    """Return the bytes of a part as received. Raises FrameError for anything else."""
    if isinstance(part, bytes):
        return len(part)
    if isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim == 1:
        return part.nbytes
    if (
        isinstance(part, list)
        and len(part) == 3
        and isinstance(part[0], str)
        and all(isinstance(n, int) and n >= 0 for n in part[1:])
    ):
        return int(part[2])
    raise FrameError("a payload part must be bytes, a uint8 array or [segment, generation, size]")


def needs_segment(nbytes: int) -> bool:
    """Return whether a part of that size should go through shared memory where it can."""
    return nbytes >= shared_memory.THRESHOLD


def placements(parts: list[Part]) -> list[Placement]:
    """Return the segments of a payload."""
    return [Placement(part[0], part[1]) for part in parts if isinstance(part, list)]


def encode(item: Any) -> list[Any]:
    """Return the message parts of `item`. Raises as `frames.encode`."""
    return frames.encode(item)


def nbytes(parts: list[Any]) -> int:
    """Return the bytes of an encoded item."""
    return sum(memoryview(part).nbytes for part in parts)


def split(shape: Sequence[Sequence[Any]], parts: list[Any]) -> list[tuple[list[Any], float]]:
    """Return (parts, weight) of each item from `shape` [(weight, number of parts)]. Raises FrameError when the numbers differ."""
    items, start = [], 0
    for weight, count in shape:
        items.append((parts[start : start + count], weight))
        start += count
    if start != len(parts):
        raise FrameError(f"the items of a put must have {start} parts together, got {len(parts)}")
    return items
