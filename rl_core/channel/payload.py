"""The form in which an item is sent to and from the channel server: inline parts, or segments of the server's shared memory.

The server never decodes a payload. Used by `client`, `puts` and `server`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_core.api.errors import FrameError
from rl_core.messages.channel import SegmentPart
from rl_core.transports import dtypes, shared_memory
from rl_core.transports.codec import LARGE_BYTES
from rl_core.transports.shared_memory import SegmentLoan

if TYPE_CHECKING:
    import numpy as np

Part: TypeAlias = "bytes | np.ndarray | SegmentPart"
"""As it is sent: `bytes` (small), a uint8 array (large, by socket), or the position in shared memory."""


def inline(part: Any) -> Part:
    """Return a part in the form in which it is sent by socket."""
    view = memoryview(part).cast("B")
    if view.nbytes < LARGE_BYTES:
        return bytes(view)
    import numpy as np

    return np.frombuffer(view, np.uint8)


def needs_segment(nbytes: int) -> bool:
    """Return whether a part of `nbytes` bytes should be passed through shared memory where that is possible."""
    return nbytes >= shared_memory.THRESHOLD


def size(parts: Iterable[Any]) -> int:
    """Return the size of a payload in bytes. Raises FrameError if it is malformed."""
    total = 0
    for part in parts:
        if isinstance(part, bytes):
            total += len(part)
        elif isinstance(part, SegmentPart) or (dtypes.is_array(part) and part.dtype == "uint8"):
            total += part.nbytes
        else:
            raise FrameError("a payload part must be bytes, a uint8 array or a SegmentPart")
    return total


def loans(parts: "Iterable[Part | None]") -> list[SegmentLoan]:
    """Return the segments among `parts`."""
    return [SegmentLoan(part.segment, part.generation) for part in parts if isinstance(part, SegmentPart)]
