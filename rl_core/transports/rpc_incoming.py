"""The clients of an RPC server and their requests. `rpc_server` creates both; handlers reply to the requests."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.api.errors import FrameError
from rl_core.messages.rpc import Caller
from rl_core.transports import frames, rpc_wire
from rl_core.transports.frames import FrameHeader
from rl_core.transports.links import ServerLoans


class Peer:
    """One client of a server. Only the I/O thread may use it."""

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.caller: Caller | None = None
        """None while anonymous."""
        self.host = ""
        """IP address of its end of the connection; "" when it is not known."""
        self.welcome = False
        """Whether its hello was answered with a welcome."""
        self.loans = ServerLoans()
        self.calls: dict[int, IncomingCall] = {}
        self.finished: OrderedDict[int, None] = OrderedDict()
        """Ids of ended calls, the oldest first."""
        self.outbox: list[list[Any]] = []
        """Answers that the I/O thread is to send."""
        self.unreachable_since: float | None = None

    @property
    def name(self) -> str:
        """`group:rank`, or "anonymous"."""
        return rpc_wire.name_of(self.caller)


class IncomingCall:
    """One request: its arguments and the methods that reply to it. Any thread may reply; only the first reply counts."""

    def __init__(
        self,
        peer: Peer,
        header: FrameHeader,
        parts: Sequence[Any],
        *,
        answer: "Callable[[IncomingCall, str, Any], bool]",
    ) -> None:
        """`answer(call, kind, value)` sends the reply and returns whether the value could be encoded."""
        self.peer = peer
        self.caller = peer.caller
        self.host = peer.host
        self.id: int = header.request_id
        self.method = header.method or ""
        self.header = header
        self.begun = False
        """Whether it was given to a handler. A request of the same id is not run again after that."""
        self.came = 0.0
        """When it was given to a handler, on the clock of the I/O thread."""
        self.confirmed = False
        """Whether a confirmation that the call was received was sent to its caller."""
        self.cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        """Run on the I/O thread when the caller gives up or is gone."""
        self._parts = parts
        self._answer = answer

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Decode and return the arguments. Raises FrameError for a malformed body."""
        body = frames.read_body(self.header, self._parts)
        self._parts = []
        if type(body) is not list or len(body) != 2 or type(body[0]) is not list or type(body[1]) is not dict:
            raise FrameError(f"arguments of {self.method} must be [positional, named]")
        return body[0], body[1]

    def reply(self, value: Any) -> bool:
        """Reply with `value` and return whether it could be encoded. If not, the caller gets the error."""
        return self._answer(self, "reply", value)

    def fail(self, error: BaseException) -> None:
        """Reply with `error`."""
        self._answer(self, "error", rpc_wire.pack_error(error))
