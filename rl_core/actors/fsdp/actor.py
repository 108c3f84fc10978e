"""The actor that trains a language model under FSDP1 or FSDP2."""

from rl_core.actors.backend import TrainBackend
from rl_core.actors.base import Actor
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.api.job import RLJobSpec


class FSDPActor(Actor):
    """One rank of a trainer with `actor.backend` fsdp1 or fsdp2."""

    def _build_backend(self, cfg: RLJobSpec) -> TrainBackend:
        """Return the FSDP backend of this rank; all ranks are data-parallel."""
        return FSDPBackend(FSDPModelManager(cfg, self.world_size, self.rank))
