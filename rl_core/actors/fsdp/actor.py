"""The FSDP actor for language models: the verbs of `Actor` over `FSDPBackend`."""

from collections.abc import Mapping
from typing import Any

from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.publishing import PublishingActor
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec


class FSDPActor(FSDPBackend, PublishingActor):
    """One rank of the trainer. Constructed on every actor process; `init_worker` comes first."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = "actor") -> None:
        """`placement` is not looked at: FSDP has data-parallel ranks only. Raises ConfigError for a role other than actor."""
        if role != "actor":
            raise ConfigError(f"FSDPActor must have role actor, got {role!r}; choose it")
        FSDPBackend.__init__(self, cfg, self.world_size, self.rank)
        PublishingActor.__init__(self, backend=self)

    def init_worker(self) -> None:
        """Build model and optimizer from `model.path`, open the publisher on rank 0, give up what `actor.offload` names."""
        self.setup_model_and_optimizer()
        self.open_publisher()
        self.occupy(self.cfg.actor.offload.resident)
