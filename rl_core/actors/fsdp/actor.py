"""The FSDP2 actor for language models: the step order of `Actor` over the model of `FSDPModelManager`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_core.actors.base import Actor
from rl_core.actors.forward import PackedBatch, score
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.memory import keep_freed_memory
from rl_core.actors.reference import ReferencePolicy
from rl_core.actors.shards import host_alias
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.transports.sockets import split_address

if TYPE_CHECKING:
    from rl_core.weights.publisher import WeightPublisher


class FSDPActor(FSDPModelManager, Actor):
    """One rank of the trainer. Constructed on every actor process; `init_worker` comes first."""

    publisher: "WeightPublisher | None" = None

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = "actor") -> None:
        """`placement` is not looked at: FSDP has data-parallel ranks only. Raises ConfigError for a role other than actor."""
        if role != "actor":
            raise ConfigError(f"FSDPActor must have role actor, got {role!r}; choose it")
        FSDPModelManager.__init__(self, cfg, self.world_size, self.rank)
        Actor.__init__(self)
        self._reference: ReferencePolicy | None = None

    def init_worker(self) -> None:
        """Build model and optimizer from `model.path`, keep the reference policy where KL needs one, open the publisher on rank 0."""
        if self.compute_device.type == "cpu":
            keep_freed_memory()
        self.setup_model_and_optimizer()
        if self.cfg.algorithm.needs_reference:
            self._reference = ReferencePolicy(list(self.model.parameters()))
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

    # Actor's backend ------------------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Longest row in tokens: the configured limit, else the model's."""
        return int(self.cfg.rollout.max_sequence_length or self.model.config.max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the model."""
        return int(self.model.config.hidden_size)

    def score_rows(
        self, input_ids: Tensor, lengths: Sequence[int], mask: Tensor, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies [B, T] of the masked tokens at the sampling temperature."""
        self._require_loaded("a forward pass")
        packed = PackedBatch.of(input_ids, lengths, mask, self.compute_device)
        return score(self.model, packed, temperature=self.cfg.rollout.sampling.temperature, entropy=entropy)

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its starting weights. Raises RuntimeError where the loss has no KL term."""
        if self._reference is None:
            raise RuntimeError(
                "the reference policy is kept only with algorithm.loss.klCoefficient above 0, got 0; set it"
            )
        return self._reference.swapped()

    # Rollouts -------------------------------------------------------------------------------------------------------

    def sync_model_to_rollout(
        self, version: int | None = None, receivers: Sequence[ReceiverAddress] = (), min_acks: int = 0
    ) -> PublishReport | None:
        """Send the weights as `version` (None: the global step) to `receivers` and wait for their acknowledgements.

        Rank 0 returns the publisher's report, the others None: they only take part in gathering the tensors.
        """
        version = self.global_step if version is None else version
        with self.loaded(), self.ranks.guard(f"publishing version {version}"):
            tensors = ((name, host_alias(tensor)) for name, tensor in self.whole_tensors())
            try:
                if self.publisher is None:
                    return None
                ties = {name: source for name, source in self.sync_names if source is not None}
                report = self.publisher.publish(version, tensors, receivers, min_acks, ties=ties)
                self.set_policy_version(version, report.digest)
                return report
            finally:
                # The other ranks gather every tensor; leaving early would leave them waiting.
                for _ in tensors:
                    pass

    def publisher_address(self) -> str | None:
        """Return the address late joiners pull from; None on ranks other than 0."""
        return None if self.publisher is None else self.publisher.address

    async def receiver_lost(self, name: str, reason: str) -> None:
        """Let a sync under way go on without the rollout `name`, which the hub declared dead."""
        if self.publisher is not None:
            self.publisher.lost(name, reason)

    def score(self, ids: Sequence[int], prompt_length: int) -> list[float] | None:
        """Return the log-probabilities of ids[prompt_length:] at the sampling temperature; rank 0 answers, the others None."""
        input_ids = torch.tensor([list(ids)], dtype=torch.int64)
        mask = torch.arange(input_ids.shape[1])[None] >= prompt_length
        with self.loaded(), self.ranks.guard("scoring a sequence"), torch.no_grad():
            log_probs, _ = self.score_rows(input_ids, [input_ids.shape[1]], mask)
        return log_probs[0, prompt_length:].tolist() if self.ranks.rank == 0 else None

    def close(self) -> None:
        """Stop serving weights."""
        if self.publisher is not None:
            self.publisher.close()
