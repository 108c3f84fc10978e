"""How an actor's weights reach the rollouts: rank 0 publishes, the other ranks take part in gathering the tensors."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.actors.base import Actor
from rl_core.actors.source import GatheredSource
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.transports.sockets import split_address

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher


class PublishingActor(Actor):
    """The verbs of an actor whose backend gives its weights as a `GatheredSource`."""

    publisher: "WeightPublisher | None" = None

    @abstractmethod
    def _version_source(self, dtype: str, bucket_bytes: int) -> GatheredSource:
        """Return the weights as they are, floating ones in `dtype`."""

    def open_publisher(self) -> None:
        """Serve weights from rank 0 of a job."""
        if self.ranks.rank != 0 or self.job is None:
            return
        from rl_core.weights.publisher import WeightPublisher  # its compiled kernels are needed on this rank only

        host = split_address(self.address)[0] if self.keys is not None else "127.0.0.1"
        self.publisher = WeightPublisher(
            self.cfg,
            self.epoch,
            identity=self.identity,
            keys=self.keys,
            bind=f"tcp://{host}:0",
            device=self.device,
            device_uuid=next(iter(self.worker_info.device_uuids), None),
        )

    def sync_model_to_rollout(
        self, version: int | None = None, receivers: Sequence[ReceiverAddress] = (), min_acks: int = 0
    ) -> PublishReport | None:
        """Send the weights as `version` (None: the global step) to `receivers` and wait for their acknowledgements.

        Rank 0 returns the publisher's report, the others None: they only take part in gathering the tensors.
        """
        version = self.global_step if version is None else version
        with self.loaded(moments=False), self.ranks.guard(f"publishing version {version}"):
            source = self._version_source(self.cfg.model.dtype, self.cfg.weights.bucket_bytes)
            try:
                if self.publisher is None:
                    return None
                report = self.publisher.publish(version, source, receivers, min_acks)
                self.set_policy_version(version, report.digest)
                return report
            finally:
                source.finish()

    def publisher_address(self) -> str | None:
        """Return the address late joiners pull from; None on ranks other than 0."""
        return None if self.publisher is None else self.publisher.address

    async def receiver_lost(self, name: str, reason: str) -> None:
        """Let a sync under way go on without the rollout `name`, which the hub declared dead."""
        if self.publisher is not None:
            self.publisher.lost(name, reason)

    def close(self) -> None:
        """Stop serving weights."""
        if self.publisher is not None:
            self.publisher.close()
