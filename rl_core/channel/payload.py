"""How an item travels to and from the channel server: its parts inline, or in segments the server owns.

The server never decodes a payload. Used by `client`, `puts` and `server`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rl_core.api.errors import FrameError
from rl_core.messages.channel import SegmentPart
from rl_core.transports import shared_memory
from rl_core.transports.codec import LARGE_BYTES
from rl_core.transports.shared_memory import SegmentLoan

Part = bytes | np.ndarray | SegmentPart
"""On the wire: `bytes` (small), a uint8 array (large, by socket), or where it lies in shared memory."""


def inline(part: Any) -> Part:
    """Return a part that travels by socket."""
    view = memoryview(part).cast("B")
    return bytes(view) if view.nbytes < LARGE_BYTES else np.frombuffer(view, np.uint8)


def needs_segment(nbytes: int) -> bool:
    """Return whether a part of that size should go through shared memory where it can."""
    return nbytes >= shared_memory.THRESHOLD


def size(parts: Iterable[Any]) -> int:
    """Return the bytes of a payload as received. Raises FrameError for what is none."""
    total = 0
    for part in parts:
        if isinstance(part, bytes):
            total += len(part)
        elif isinstance(part, SegmentPart) or (isinstance(part, np.ndarray) and part.dtype == np.uint8):
            total += part.nbytes
        else:
            raise FrameError("a payload part must be bytes, a uint8 array or a SegmentPart")
    return total


def loans(parts: Iterable[Part | None]) -> list[SegmentLoan]:
    """Return the segments among `parts`."""
    return [SegmentLoan(part.segment, part.generation) for part in parts if isinstance(part, SegmentPart)]
