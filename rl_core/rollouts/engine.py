"""`Engine`: the port between the rollout worker and what generates. Every engine has a worker class that builds it.

An engine runs the model: it generates rows, takes weights, and moves its memory on and off the device. The worker does everything
else: prompts, environments, sampling settings, the content check, and when weights may change (`base`, `groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal, Protocol

from rl_core.api.errors import RLJobError
from rl_core.rollouts.generation import RowGenerator
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.sampling import SamplingParams

if TYPE_CHECKING:
    from rl_core.weights.target import WeightTarget

PROVEN, UNPROVEN = "engine tensors", "content probe"
"""Values of `Engine.weights_proof`."""
Part = Literal["weights", "kv_cache"]
"""A part of an engine's memory that may leave its device."""


class Residency(Protocol):
    """Moves parts of an engine's memory on and off its device. Nothing may run while a part is off; both calls may be repeated."""

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`."""
        ...

    def onload(self, parts: Collection[Part]) -> None:
        """Bring `parts` back to the device: weights with the values they had, the cache empty."""
        ...


class Engine(Protocol):
    """A model that generates. Implemented by `hf.rollout_engine.HFRolloutEngine` and `sglang.rollout_engine.SGLangRolloutEngine`."""

    @property
    def weight_target(self) -> WeightTarget:
        """Where new weights are written. Its `prepare` is called when nothing generates and no row is admitted."""
        ...

    @property
    def residency(self) -> Residency:
        """Moves the engine's memory on and off the device."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that new tokens are drawn from; meaningless before the weight target's first `resume`."""
        ...

    @property
    def weights_proof(self) -> str:
        """What proves the served weights: checksums of the engine's tensors (PROVEN), or the content check alone (UNPROVEN)."""
        ...

    @property
    def row_capacity(self) -> int:
        """Number of rows in flight at which the worker leases no more prompts: those of a full batch, and those that replace them at once."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence of prompt and completion, tokens."""
        ...

    def generator(self, params: SamplingParams) -> RowGenerator:
        """Return a generator of rows with the sampling settings `params`. All generators share the engine's batch."""
        ...

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause generation; returns once nothing runs. Running and queued rows continue when the weight target's `resume` is called.

        `keep_cache`: rows continue with the keys and values they have; other rows never use those. Otherwise they are recomputed.
        """
        ...

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Register callbacks for an engine that runs in a process of its own; they may be called from any thread.

        `lost(reason)`: the process and its weights are gone. `back(None)`: another process is ready for weights. `back(error)`: there
        will be none. An engine in the worker's own process calls neither.
        """
        ...

    def load(self) -> EngineLoad:
        """Return how much the engine has to do. Cheap; may be called from any thread."""
        ...

    def close(self) -> None:
        """Stop the engine; rows in flight fail as GenerationUnavailable. Blocks until it has stopped; idempotent."""
        ...
