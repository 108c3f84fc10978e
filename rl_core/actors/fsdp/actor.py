"""The FSDP2 actor for language models: the verbs of `Actor` over `FSDPBackend`, and the publisher of its weights."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.actors.base import Actor
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.source import FSDPSource
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.transports.sockets import split_address

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher


class FSDPActor(FSDPBackend, Actor):
    """One rank of the trainer. Constructed on every actor process; `init_worker` comes first."""

    publisher: "WeightPublisher | None" = None

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = "actor") -> None:
        """`placement` is not looked at: FSDP has data-parallel ranks only. Raises ConfigError for a role other than actor."""
        if role != "actor":
            raise ConfigError(f"FSDPActor must have role actor, got {role!r}; choose it")
        FSDPBackend.__init__(self, cfg, self.world_size, self.rank)
        Actor.__init__(self, backend=self)

    def init_worker(self) -> None:
        """Build model and optimizer from `model.path`, open the publisher on rank 0."""
        self.setup_model_and_optimizer()
        if self.ranks.rank == 0 and self.job is not None:
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

    # Rollouts -------------------------------------------------------------------------------------------------------

    def sync_model_to_rollout(
        self, version: int | None = None, receivers: Sequence[ReceiverAddress] = (), min_acks: int = 0
    ) -> PublishReport | None:
        """Send the weights as `version` (None: the global step) to `receivers` and wait for their acknowledgements.

        Rank 0 returns the publisher's report, the others None: they only take part in gathering the tensors.
        """
        version = self.global_step if version is None else version
        with self.loaded(), self.ranks.guard(f"publishing version {version}"):
            source = self._version_source()
            try:
                if self.publisher is None:
                    return None
                report = self.publisher.publish(version, source, receivers, min_acks)
                self.set_policy_version(version, report.digest)
                return report
            finally:
                source.finish()

    def _version_source(self) -> FSDPSource:
        """Return the weights as they are, for one publish."""
        dtype, bucket_bytes = self.cfg.model.dtype, self.cfg.weights.bucket_bytes
        return FSDPSource(self.named_slices(), self.sync_names, self.ranks, dtype=dtype, bucket_bytes=bucket_bytes)

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
