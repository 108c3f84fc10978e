"""`WeightMethods`: the methods of every worker that takes the weights of the trainer, by its `WeightReceiver`."""

from collections.abc import Mapping
from typing import ClassVar

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
from rl_core.workers.worker import Worker


class WeightMethods(Worker):
    """A worker with a weight receiver. The actor calls these methods."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {
        ACTOR: frozenset({"weights_offer", "weights_transfer", "weights_commit", "weights_abort", "weights_relay"})
    }

    def _receiver(self) -> WeightReceiver:
        """Return the receiver. Raises InfrastructureError before `init_worker`."""
        raise NotImplementedError

    async def join(self, publisher_address: str) -> ReceiverAck:
        """Load the committed weights from the publisher at `publisher_address`.

        Returns their version and digest once they are verified and served.
        """
        version, digest = await self._receiver().pull(publisher_address)
        return ReceiverAck(version=version, digest=digest)

    async def weights_offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Answer the publisher's offer of new weights. The answer is sent once nothing generates any more."""
        return await self._receiver().offer(offer)

    async def weights_transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Load the offered version and verify it."""
        return await self._receiver().transfer(transfer)

    async def weights_commit(self, version: int, digest: str) -> ReceiverAnswer:
        """Start serving the version that was transferred."""
        return await self._receiver().commit(version, digest)

    async def weights_abort(self, generation: int) -> None:
        """Abort a transfer that waits for a lost member of its process group.

        `generation` is the number of that process group; a group that replaces a failed one has a higher number.
        """
        await self._receiver().abort(generation)

    async def weights_relay(self, digest: str, encrypted: bool) -> StreamSource | ReceiverRefusal:
        """Send the verified version `digest` to another rollout, as a stream that is encrypted if `encrypted`.

        Returns where to connect, or why it is refused.
        """
        return await self._receiver().relay(digest, encrypted)
