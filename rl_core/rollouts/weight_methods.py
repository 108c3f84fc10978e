"""`WeightMethods`: base class of the workers that receive weights from the trainer. It builds their `WeightReceiver` and reports the version."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_core.api.errors import InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import MemberState
from rl_core.messages.weights import (
    ReceiverAck,
    ReceiverAnswer,
    ReceiverRefusal,
    StreamSource,
    WeightOffer,
    WeightTransfer,
)
from rl_core.plan.groups import ACTOR
from rl_core.weights.receiver import WeightReceiver
from rl_core.weights.receiver_state import ReceiverState
from rl_core.weights.target import WeightTarget
from rl_core.workers.worker import Worker


class WeightMethods(Worker):
    """A worker that receives weights. The actor calls the public methods."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {
        ACTOR: frozenset({"weights_offer", "weights_transfer", "weights_commit", "weights_relay"})
    }

    _weights: WeightReceiver | None = None
    """The receiver, once `_build_receiver` was called."""
    _awaited: tuple[int, asyncio.Future[None]] | None = None
    """Version for which `_await_version` waits, and the future that ends the wait."""

    async def join(self, publisher_address: str) -> ReceiverAck:
        """Load the committed weights from the publisher at `publisher_address`.

        Returns their version and digest once they are verified and served.
        """
        version, digest = await self._receiver().pull(publisher_address)
        return ReceiverAck(version=version, digest=digest)

    async def weights_offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Answer the publisher's offer of new weights. The answer is sent once no generation is running."""
        return await self._receiver().offer(offer)

    async def weights_transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Load the offered version and verify it."""
        return await self._receiver().transfer(transfer)

    async def weights_commit(self, version: int, digest: str) -> ReceiverAnswer:
        """Start serving the version that was transferred."""
        return await self._receiver().commit(version, digest)

    async def weights_relay(self, digest: str, encrypted: bool) -> StreamSource | ReceiverRefusal:
        """Send the verified version `digest` to another rollout, as a stream that is encrypted if `encrypted`.

        Returns where to connect, or why it is refused.
        """
        return await self._receiver().relay(digest, encrypted)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _build_receiver(self, spec: RLJobSpec, target: WeightTarget) -> WeightReceiver:
        """Build the receiver, which loads weights into `target`; return it."""
        self._weights = WeightReceiver(
            spec,
            self.identity,
            self.epoch,
            target,
            keys=self.keys,
            device=self.device,
            device_uuids=self.worker_info.device_uuids,
            on_state=self._on_weights,
            host=self.worker_info.node_ip,
        )
        self._weights.warm_up()
        return self._weights

    def _receiver(self) -> WeightReceiver:
        """Return the receiver. Raises InfrastructureError before it is built."""
        if self._weights is None:
            raise InfrastructureError("the model is not built yet; call init_worker first")
        return self._weights

    async def _close_receiver(self) -> None:
        """Stop receiving weights. May be called again."""
        receiver, self._weights = self._weights, None
        if receiver is not None:
            await receiver.close()

    def _on_weights(self, state: ReceiverState, version: int, digest: str) -> None:
        """Report version and state of the weights to the hub. Called by the receiver at each change."""
        serving = state is ReceiverState.SERVING
        self.set_policy_version(
            version if version >= 0 else None, digest or None, self._weights_proof() if serving else ""
        )
        self.set_state(MemberState.SERVING if serving else MemberState.UPDATING)
        if serving and self._awaited is not None and version >= self._awaited[0]:
            (_, served), self._awaited = self._awaited, None
            if not served.done():
                served.set_result(None)

    async def _await_version(self, version: int) -> None:
        """Wait until this worker serves `version` or a later one. A later call, or `_stop_awaiting`, cancels the wait (CancelledError)."""
        self._stop_awaiting()
        receiver = self._receiver()
        if receiver.state is ReceiverState.SERVING and receiver.current()[0] >= version:
            return
        self._awaited = version, asyncio.get_running_loop().create_future()
        with self.waiting("weights", ACTOR):
            await self._awaited[1]

    def _stop_awaiting(self) -> None:
        """Cancel the wait for a version, if there is one."""
        if self._awaited is not None:
            self._awaited[1].cancel()
            self._awaited = None

    def _weights_proof(self) -> str:
        """Return how the weights that are served were verified."""
        return "checksums"

    def _report_version(self) -> None:
        """Report the version that is served again: the hub has forgotten that of a member that lost its connection."""
        receiver = self._receiver()
        if receiver.state is ReceiverState.SERVING:
            self._on_weights(receiver.state, *receiver.current())

    def _weights_status(self) -> dict[str, Any]:
        """Return version and digest of the weights, and the state of their receiver."""
        version, digest = self._weights.current() if self._weights is not None else (-1, "")
        state = self._weights.state if self._weights is not None else ReceiverState.UNVERSIONED
        return {"version": version, "digest": digest, "weights": state.value}
