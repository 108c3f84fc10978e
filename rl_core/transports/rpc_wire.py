"""Shared by client and server of RPC: the caller's identity, the encoding of errors, and constants. See `rpc` for the protocol."""

import asyncio
import contextvars
import math
import numbers
import threading
import traceback

from rl_core.api.errors import RemoteError, RLJobError, error_types, public_type, text_of
from rl_core.api.user_code import own_frames
from rl_core.messages.rpc import Caller, PackedError

MAX_CALLS = 64
"""Largest number of requests in flight per connection, without long polls. Further ones wait at the client; their timeout runs."""
MAX_BYTES = 256 * 2**20
"""Payload bytes in flight per connection."""
REMEMBERED_IDS = 1_024
"""Finished request ids a server remembers per client, to run nothing twice."""
PROBE_SECONDS = 0.5
"""How often a server asks ZeroMQ whether its peers are still connected."""
LOST_SECONDS = 1.0
"""How long a peer may be unreachable before a server counts it as lost."""
MAX_TRACEBACK = 65_536
"""Characters of a traceback that are sent; with its error's text it may be of any size."""
RECEIPT_SECONDS = 0.2
"""A call that runs longer is confirmed to its caller, so that a DeadlineExceeded can tell whether it was received."""

CALLER: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("rljob_rpc_caller", default=None)
CALLER_HOST: contextvars.ContextVar[str] = contextvars.ContextVar("rljob_rpc_caller_host", default="")


def current_caller() -> Caller | None:
    """Return the caller of the running handler, or None for an anonymous one.

    With keys, the caller's key proves `group`. It also proves `role`, except for "supervisor": a supervisor has the key of the process
    whose end it reports. Rank and incarnation are as the caller states them.
    """
    return CALLER.get()


def current_caller_host() -> str:
    """Return the IP address from which the caller of the running handler is connected; "" when it is not known."""
    return CALLER_HOST.get()


def name_of(caller: Caller | None) -> str:
    """Return `group:rank`, or "anonymous"."""
    return caller.name if caller is not None else "anonymous"


def pack_error(error: BaseException) -> PackedError:
    """Return `error` as a record, named after its class or the nearest base class that the other process knows.

    The traceback begins in the user's code if there is a line of it, and is empty for an error that was not raised. A long text is truncated,
    so that the error always fits into a message.
    """
    public_class = public_type(error) if isinstance(error, RLJobError) else RLJobError
    was_raised = error.__traceback__ is not None
    trace = (own_frames(error) or "".join(traceback.format_exception(error)))[:MAX_TRACEBACK] if was_raised else ""
    return PackedError(
        type=(type(error) if public_class is RLJobError else public_class).__name__,
        message=text_of(error),
        traceback=trace.encode("utf-8", "replace").decode(),
    )


def rebuild_error(packed: PackedError, *, method: str, peer: str) -> RLJobError:
    """Return the error in `packed`, as its own type if that is public, otherwise as RemoteError with the traceback."""
    cls = error_types().get(packed.type)
    if cls is None:
        return RemoteError(f"{method} at {peer} raised {packed.type}: {packed.message}\n{packed.traceback}")
    error = cls(packed.message)
    if packed.traceback and cls is not RemoteError:  # whose text has the traceback of the user's code
        error.add_note(f"raised by {method} at {peer}:\n{packed.traceback}")
    return error


def finite_seconds(timeout: float) -> float:
    """Return `timeout`, in seconds. Raises ValueError unless it is a finite number, because every wait must end."""
    if not isinstance(timeout, numbers.Real) or not math.isfinite(timeout):
        raise ValueError(f"timeout must be None or a finite number of seconds, got {timeout!r}")
    return timeout


def refuse_on_event_loop(what: str) -> None:
    """Raise RuntimeError when the calling thread runs an event loop, which a blocking call would freeze."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{what} blocks and was called on an event-loop thread ({threading.current_thread().name}); await its asynchronous form (`..._async`, "
        "`async_wait`, or the handle that `async_op=True` returns)"
    )
