"""`Engine`: the interface between the rollout worker and the library that generates. Every engine has a worker class that builds it.

An engine runs the model: it generates rows, receives weights, and moves its memory on and off the device. The worker does everything else:
prompts, environments, sampling settings, the content check, and when weights may change (`base`, `groups`).
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
"""A part of an engine's memory that can be moved off its device."""


class Residency(Protocol):
    """Moves parts of an engine's memory on and off its device.

    The engine must not generate while a part is off. Both methods may be called again for the same parts.
    """

    def offload(self, parts: Collection[Part]) -> None:
        """Free the device memory of `parts`."""
        ...

    def onload(self, parts: Collection[Part]) -> None:
        """Move `parts` back to the device. Weights have their former values; the cache is empty."""
        ...


class Engine(Protocol):
    """A model that generates. Implemented by `hf.rollout_engine.HFRolloutEngine` and `sglang.rollout_engine.SGLangRolloutEngine`."""

    @property
    def weight_target(self) -> WeightTarget:
        """Receives new weights. Its `prepare` is called when nothing generates and no row is admitted."""
        ...

    @property
    def residency(self) -> Residency:
        """Moves the engine's memory on and off the device."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that generate new tokens. It has no meaning before the first `resume` of the weight target."""
        ...

    @property
    def weights_proof(self) -> str:
        """How the served weights were verified.

        PROVEN: by checksums of the engine's own tensors. UNPROVEN: only by the content check, which compares log-probabilities of a sample.
        """
        ...

    @property
    def row_capacity(self) -> int:
        """Number of rows in flight at which the worker leases no more prompts.

        It is the size of a full batch plus the rows that wait in the engine to replace finished ones.
        """
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence of prompt and completion in tokens."""
        ...

    def generator(self, params: SamplingParams) -> RowGenerator:
        """Return a generator of rows with the sampling settings `params`. All generators share the engine's batch."""
        ...

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause generation; returns once nothing generates. Rows continue when the weight target's `resume` is called; none is lost.

        With `keep_cache` rows continue with their present keys and values, which are never reused for other rows. Otherwise keys and values
        are computed again with the new weights.
        """
        ...

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Register callbacks for an engine that runs in a process of its own. They may be called from any thread.

        - `lost(reason)`: the process has ended, and its weights are lost.
        - `back(None)`: a new process is ready to receive weights.
        - `back(error)`: no new process can be started.

        An engine in the worker's own process calls neither.
        """
        ...

    def load(self) -> EngineLoad:
        """Return how busy the engine is. This does not load weights. Fast; may be called from any thread."""
        ...

    def close(self) -> None:
        """Stop the engine and wait until it has stopped. Rows in flight fail with GenerationUnavailable. May be called again."""
        ...
