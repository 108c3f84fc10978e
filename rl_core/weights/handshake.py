"""One receiver's part in one sync, and the gate all of them pass before anybody serves the new version.

`Handshake` talks OFFER -> TRANSFER -> COMMIT with one receiver, or OFFER -> COMMIT where the offer says where the data are;
`Gate` decides when the version is committed. Both live on the publisher's event loop; a handshake that fails concerns nobody
else.
"""

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.messages.weights import (
    ReceiverAck,
    ReceiverAnswer,
    ReceiverApplied,
    ReceiverFailure,
    ReceiverReady,
    ReceiverRefusal,
    WeightOffer,
    WeightSource,
    WeightTransfer,
)
from rl_core.transports.rpc import RpcClient
from rl_core.transports.rpc_call import CallFuture


class HandshakeState(enum.Enum):
    """OFFERED -> READY -> APPLIED -> COMMITTING -> ACKED, or LOADING -> APPLIED ...; FAILED ends it anywhere.

    A patch that does not hold leads to READY again.
    """

    OFFERED = "offered, not ready"
    LOADING = "offered with its data, not applied"
    READY = "ready, not applied"
    APPLIED = "applied, not committed"
    COMMITTING = "committed, not acknowledged"
    ACKED = "acknowledged"
    FAILED = "failed"


class Handshake:
    """The conversation with the receiver `name`."""

    def __init__(self, *, name: str, client: RpcClient, host_token: str) -> None:
        self.name, self.client, self.host_token = name, client, host_token
        self.state = HandshakeState.OFFERED
        self.reason = ""
        """Why it failed."""
        self.verification_failed = False
        """Whether it got all bytes and some were wrong; a collective goes on then."""
        self.transport = ""
        """What carried the bytes: shared, stream, message, gloo, nccl, ipc; "" = no bytes were needed."""
        self.patched = False
        """Whether a patch was enough."""
        self.relayed = False
        """Whether another receiver gave the bytes."""
        self.ready: ReceiverReady | None = None
        """Its last READY answer, once it gave one."""
        self.ack: ReceiverAck | None = None
        """Its ACK answer to COMMIT; None before it, and when it had the version already."""
        self.changed: Callable[[], None] = lambda: None
        """Called at each change of state, on the loop."""
        self._since = time.monotonic()
        self._digest = ""
        """Of the version on offer."""
        self._offered: tuple[CallFuture, WeightSource | None] | None = None
        """The offer under way and its source."""

    @property
    def applied(self) -> bool:
        """Whether the version is proven in the receiver's memory."""
        return self.state in (HandshakeState.APPLIED, HandshakeState.COMMITTING, HandshakeState.ACKED)

    @property
    def live(self) -> bool:
        """Whether it may still apply the version."""
        return self.state in (HandshakeState.OFFERED, HandshakeState.LOADING, HandshakeState.READY)

    def describe(self) -> str:
        """Return name, state and age of the state, and why it failed."""
        text = f"{self.name} {self.state.value} for {time.monotonic() - self._since:.1f} s"
        return f"{text} ({self.reason})" if self.reason else text

    def start(self, offer: WeightOffer, timeout: float) -> None:
        """Send OFFER, from any thread; `offered` hears the answer."""
        self._digest = offer.digest
        source = offer.source or offer.patch
        if source is not None:
            self.state = HandshakeState.LOADING
        self._offered = (self.client.call_future("weights_offer", offer, timeout=timeout), source)

    async def offered(self) -> None:
        """Bring the receiver to READY; to APPLIED when the offer says where the data are; further when it has the version."""
        if self._offered is None:
            raise AssertionError("bug: the offer must be started before its answer is awaited")
        sent, source = self._offered
        answer = await self._heard(asyncio.wrap_future(sent), ReceiverAnswer)
        if isinstance(answer, ReceiverReady):
            self.ready = answer
            self._enter(HandshakeState.READY)
        elif isinstance(answer, ReceiverAck):
            self._enter(HandshakeState.ACKED)
        elif isinstance(answer, ReceiverRefusal):
            self.fail(f"refused: {answer.reason}")
        elif answer is not None:
            self._take_applied(answer, source)

    async def transfer(self, transfer: WeightTransfer, timeout: float, *, relayed: bool = False) -> None:
        """Bring the receiver from READY to APPLIED; it stays READY when a patch did not hold there.

        `relayed`: another receiver gives the bytes. It stays READY when that fails, with the reason, and must be offered the version again.
        """
        self.transport = transfer.source.kind
        call = self.client.call("weights_transfer", transfer, timeout=timeout)
        answer = await self._heard(call, ReceiverApplied | ReceiverReady | ReceiverFailure)
        if isinstance(answer, ReceiverReady):
            self.ready = answer
        elif relayed and isinstance(answer, ReceiverFailure):
            self.reason = answer.reason
        elif answer is not None:
            self.relayed = relayed
            self._take_applied(answer, transfer.source)

    def _take_applied(self, answer: ReceiverApplied | ReceiverFailure, source: WeightSource | None) -> None:
        if isinstance(answer, ReceiverApplied):
            if source is not None and answer.loaded:
                self.transport = source.kind
            self.patched = answer.patched
            self._enter(HandshakeState.APPLIED)
        elif answer.aborted:
            self.reason = answer.reason  # READY still: the group ended, it will be offered again
        else:
            names = ", ".join(answer.names[:5])
            self.verification_failed = bool(names)
            self.fail(f"verification failed: {names}: {answer.reason}" if names else answer.reason)

    async def commit(self, version: int, digest: str, timeout: float) -> None:
        """Bring the receiver from APPLIED to ACKED."""
        self._enter(HandshakeState.COMMITTING)
        call = self.client.call("weights_commit", version, digest, timeout=timeout)
        answer = await self._heard(call, ReceiverAck | ReceiverRefusal)
        if isinstance(answer, ReceiverAck):
            self.ack = answer
            self._enter(HandshakeState.ACKED)
        elif answer is not None:
            self.fail(f"commit refused: {answer.reason}")

    def fail(self, reason: str) -> None:
        """End the conversation: the receiver is out of this sync."""
        self.reason = f"{self.state.value}: {reason}"
        self._enter(HandshakeState.FAILED)

    async def _heard(self, call: Awaitable[Any], expected: Any) -> Any:
        """Return the answer, one of the types `expected`; None when there will be none, which ends the conversation."""
        try:
            answer = await call
        except RLJobError as error:
            self.fail(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return None
        if not isinstance(answer, expected):
            self.fail(f"it answered with {type(answer).__name__}, which is no answer to that")
            return None
        if isinstance(answer, ReceiverApplied | ReceiverAck) and answer.digest != self._digest:
            self.fail(f"it announced version {answer.version} with digest {answer.digest}, offered was {self._digest}")
            return None
        return answer

    def _enter(self, state: HandshakeState) -> None:
        self.state = state
        self._since = time.monotonic()
        self.changed()


class Gate:
    """Opens when the version is committed: all live receivers applied it, or enough did and the others are slow.

    A receiver that died unnoticed so costs the others `straggler_seconds` of serving, not its whole deadline.
    """

    def __init__(self, *, min_acks: int, straggler_seconds: float, opened: Callable[[], None]) -> None:
        self.handshakes: Sequence[Handshake] = ()
        self._min_acks, self._straggler_seconds, self._opened = min_acks, straggler_seconds, opened
        self._decision: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._grace: asyncio.TimerHandle | None = None

    def watch(self, handshakes: "Sequence[Handshake]") -> None:
        """Decide over `handshakes`, and look whenever one of them changes."""
        self.handshakes = handshakes
        for handshake in handshakes:
            handshake.changed = self.look
        self.look()

    async def wait(self) -> bool:
        """Return whether the version was committed."""
        return await asyncio.shield(self._decision)

    def look(self) -> None:
        """Decide if it can be decided; called whenever a handshake changes."""
        if self._decision.done():
            return
        applied = sum(handshake.applied for handshake in self.handshakes)
        if not any(handshake.live for handshake in self.handshakes):
            self._decide(applied >= self._min_acks)
        elif self._grace is None and applied >= max(1, self._min_acks):
            self._grace = asyncio.get_running_loop().call_later(self._straggler_seconds, self._decide, True)

    def _decide(self, commit: bool) -> None:
        if self._grace is not None:
            self._grace.cancel()
        if not self._decision.done():
            if commit:
                self._opened()
            self._decision.set_result(commit)
