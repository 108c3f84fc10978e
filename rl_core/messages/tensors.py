"""The messages by which a tensor of an accelerator goes from one worker to another.

sender   -> receiver   TensorHeader, in the place of a message of `Worker.send`
receiver -> sender     TensorTarget, or PackedError when the tensor is of another shape or type than expected
sender   -> receiver   GroupPlan, DeviceMemory, or the tensor itself; PackedError when the sender has given up
receiver -> sender     None when the tensor has arrived; TransportUnavailable, after which the sender uses another transport; PackedError
sender   -> receiver   None when the tensor has arrived at all of several receivers; PackedError when the transfer to another one has failed
"""

from rl_core.messages.members import Incarnation
from rl_core.messages.registry import record


@record
class TensorLocation:
    """Where a tensor is."""

    device: str
    """UUID of the accelerator; "" for host memory."""
    host_token: str
    """Equal for processes that share /dev/shm."""


@record
class TensorHeader:
    """Announces a tensor that is on an accelerator of the sender, to one receiver or to each of several."""

    transfer: str
    """Unique name of the transfer. The messages that follow are stored under it."""
    shape: tuple[int, ...]
    dtype: str
    location: TensorLocation
    incarnation: Incarnation
    """Incarnation of the sender."""
    receivers: int
    """Number of the receivers."""


@record
class TensorTarget:
    """The receiver has seen the header and expects such a tensor."""

    location: TensorLocation
    """Where the receiver wants the tensor."""
    group: str
    """Key of the process group that the receiver has formed with the sender and that works; "" if there is none."""


@record
class DeviceMemory:
    """Memory of the sender, on the accelerator that both ends use, with the elements of the tensor in row-major order."""

    handle: tuple[int | bytes | bool, ...]
    """Arguments by which torch maps the memory; usable once."""
    start: int
    """Byte at which the tensor starts in the mapped memory."""


@record
class TransportUnavailable:
    """The receiver could not map the memory, or could not form the process group. No byte of the tensor was sent."""

    reason: str
