"""The actor that trains a language model under megatron-core."""

from rl_core.actors.backend import TrainBackend
from rl_core.actors.base import Actor
from rl_core.actors.megatron.backend import MegatronBackend
from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.api.job import RLJobSpec


class MegatronActor(Actor):
    """One rank of a trainer with `actor.backend` megatron."""

    def _build_backend(self, cfg: RLJobSpec) -> TrainBackend:
        """Return the Megatron backend of this rank, laid out as `actor.parallel` says."""
        return MegatronBackend(MegatronModelManager(cfg, self.world_size, self.rank))
