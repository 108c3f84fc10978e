"""The conversation with one receiver during a sync, and the decision when the version is committed.

A `Handshake` performs OFFER -> TRANSFER -> COMMIT with one receiver, or OFFER -> COMMIT if the offer says where the data is.
`CommitGate` decides when the version is committed. Both live on the publisher's event loop. A handshake that fails does not affect
the others.
"""

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_core.api.errors import RLJobError, WorkerLost
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
    """OFFERED -> READY -> APPLIED -> COMMITTING -> ACKED, or LOADING -> APPLIED ...; any state may lead to FAILED.

    A patch that fails verification leads back to READY.
    """

    OFFERED = "offered, not ready"
    LOADING = "offered with its data, not applied"
    READY = "ready, not applied"
    APPLIED = "applied, not committed"
    COMMITTING = "committed, not acknowledged"
    ACKED = "acknowledged"
    FAILED = "failed"


class Handshake:
    """The conversation with the receiver `name`. `counts`: whether its acknowledgement counts for the minimum that the sync needs."""

    def __init__(self, *, name: str, client: RpcClient, host_token: str, counts: bool = True) -> None:
        self.name, self.client, self.host_token, self.counts = name, client, host_token, counts
        self.state = HandshakeState.OFFERED
        self.reason = ""
        """Reason of the failure."""
        self.verification_failed = False
        """Whether all bytes arrived and some were wrong. The process group stays usable then."""
        self.transport = ""
        """How the bytes were sent: shared, stream, message, gloo, nccl or ipc; "" if no bytes were needed."""
        self.patched = False
        """Whether a patch was applied instead of the whole version."""
        self.relayed = False
        """Whether another receiver sent the bytes."""
        self.opened: frozenset[int] | None = None
        """Numbers of the handles in the last TRANSFER that the receiver has opened. None: it lives, but did not answer in time."""
        self.ready: ReceiverReady | None = None
        """The last READY answer; None before the first."""
        self.ack: ReceiverAck | None = None
        """The ACK answer to COMMIT; None before it, and if the receiver had the version already."""
        self.changed: Callable[[], None] = lambda: None
        """Called on the event loop at each change of state."""
        self._since = time.monotonic()
        self._digest = ""
        """Digest of the offered version."""
        self._offered: tuple[CallFuture, WeightSource | None] | None = None
        """The pending call of OFFER and the source in it."""

    @property
    def applied(self) -> bool:
        """Return whether the version is verified in the receiver's memory."""
        return self.state in (HandshakeState.APPLIED, HandshakeState.COMMITTING, HandshakeState.ACKED)

    @property
    def acknowledged(self) -> bool:
        """Return whether the receiver serves the version."""
        return self.state is HandshakeState.ACKED

    @property
    def ended(self) -> bool:
        """Return whether the conversation is over."""
        return self.state in (HandshakeState.ACKED, HandshakeState.FAILED)

    @property
    def live(self) -> bool:
        """Return whether the receiver may still apply the version."""
        return self.state in (HandshakeState.OFFERED, HandshakeState.LOADING, HandshakeState.READY)

    def describe(self) -> str:
        """Return name, state, age of the state, and the reason of a failure."""
        text = f"{self.name} {self.state.value} for {time.monotonic() - self._since:.1f} s"
        return f"{text} ({self.reason})" if self.reason else text

    def start(self, offer: WeightOffer, timeout: float) -> None:
        """Send OFFER, from any thread. `offered` awaits the answer. `timeout` is in seconds."""
        self._digest = offer.digest
        source = offer.source or offer.patch
        if source is not None:
            self.state = HandshakeState.LOADING
        self._offered = (self.client.call_future("weights_offer", offer, timeout=timeout), source)

    async def offered(self) -> None:
        """Wait for the answer to OFFER.

        The state becomes READY; APPLIED if the offer said where the data is; ACKED if the receiver serves the version already.
        """
        if self._offered is None:
            raise AssertionError("bug: the offer must be started before its answer is awaited")
        call, source = self._offered
        answer = await self._await_answer(asyncio.wrap_future(call), ReceiverAnswer)
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
        """Send TRANSFER; the state becomes APPLIED, or stays READY if a patch failed verification.

        `relayed`: whether another receiver sends the bytes. If that fails, the state stays READY, `reason` is set, and the version must be
        offered again.
        """
        self.transport = transfer.source.kind
        call = self.client.call("weights_transfer", transfer, timeout=timeout)
        self.opened = None
        answer = await self._await_answer(call, ReceiverApplied | ReceiverReady | ReceiverFailure)
        if isinstance(answer, ReceiverApplied | ReceiverFailure):
            self.opened = frozenset(answer.opened)
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
        """Send COMMIT; the state becomes ACKED."""
        self._enter(HandshakeState.COMMITTING)
        call = self.client.call("weights_commit", version, digest, timeout=timeout)
        answer = await self._await_answer(call, ReceiverAck | ReceiverRefusal)
        if isinstance(answer, ReceiverAck):
            self.ack = answer
            self._enter(HandshakeState.ACKED)
        elif answer is not None:
            self.fail(f"commit refused: {answer.reason}")

    def fail(self, reason: str) -> None:
        """End the conversation: the receiver takes no further part in this sync."""
        self.reason = f"{self.state.value}: {reason}"
        self._enter(HandshakeState.FAILED)

    async def _await_answer(self, call: Awaitable[Any], expected: Any) -> Any:
        """Return the answer, an instance of `expected`; None if there is no valid answer, which fails the handshake."""
        try:
            answer = await call
        except RLJobError as error:
            self.fail(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            if isinstance(error, WorkerLost):
                self.opened = frozenset()  # a process that has ended keeps nothing open
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


class CommitGate:
    """Opens when the version is committed: when all live receivers have applied it, or when enough have and the others are slow.

    A receiver that died unnoticed therefore delays the others by `straggler_seconds`, not by its whole deadline. The future `settled` is done
    when the version is committed, enough receivers serve it, and no receiver that has applied it still owes its acknowledgement. Slower
    receivers may still be loading.
    """

    def __init__(self, *, min_acks: int, straggler_seconds: float, opened: Callable[[], None]) -> None:
        self.handshakes: Sequence[Handshake] = ()
        self._min_acks, self._straggler_seconds, self._on_commit = min_acks, straggler_seconds, opened
        self._decision: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._straggler_timer: asyncio.TimerHandle | None = None

    def watch(self, handshakes: "Sequence[Handshake]") -> None:
        """Decide by the states of `handshakes`, and check again whenever one of them changes."""
        self.handshakes = handshakes
        for handshake in handshakes:
            handshake.changed = self.check
        self.check()

    async def wait(self) -> bool:
        """Wait for the decision and return whether the version was committed."""
        return await asyncio.shield(self._decision)

    def check(self) -> None:
        """Decide if that is possible. Called whenever a handshake changes."""
        if self._decision.done():
            self._check_settled(committed=self._decision.result())
            return
        applied = sum(handshake.applied and handshake.counts for handshake in self.handshakes)
        if not any(handshake.live for handshake in self.handshakes):
            self._decide(applied >= self._min_acks)
        elif self._straggler_timer is None and applied >= max(1, self._min_acks):
            self._straggler_timer = asyncio.get_running_loop().call_later(self._straggler_seconds, self._decide, True)

    def _decide(self, commit: bool) -> None:
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()
        if not self._decision.done():
            if commit:
                self._on_commit()
            self._decision.set_result(commit)

    def _check_settled(self, *, committed: bool) -> None:
        waiting = any(handshake.applied and not handshake.acknowledged for handshake in self.handshakes)
        served = sum(handshake.acknowledged and handshake.counts for handshake in self.handshakes)
        if committed and not waiting and served >= self._min_acks and not self.settled.done():
            self.settled.set_result(None)
