"""The engine as a place for weights: the port `weights.target.WeightTarget` over an `EngineLoop`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

from torch import Tensor

from rl_core.rollouts.hf.loop import EngineLoop


class EngineTarget:
    """Implements `WeightTarget` and `InPlaceTarget` for a rollout worker; its receiver calls it."""

    def __init__(self, loop: EngineLoop, *, pause: Callable[[float], Awaitable[None]]) -> None:
        """`pause(deadline)` returns once nothing generates and nothing new is admitted."""
        self._loop = loop
        self._pause = pause

    async def prepare(self, deadline: float) -> None:
        """Wait until nothing generates."""
        await self._pause(deadline)

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model."""
        dtypes = self._loop.engine.dtypes()
        return {name: (shape, dtypes[name]) for name, shape in self._loop.engine.names_and_shapes().items()}

    def destinations(self) -> Mapping[str, Tensor]:
        """Return the parameters that may be written in place: on CPU, those stored as they are named."""
        return self._loop.engine.destinations()

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write every tensor where it belongs; names and shapes were compared with the manifest before."""
        self._loop.engine.write_weights(tensors)

    async def resume(self, version: int, digest: str) -> None:
        """Generate with `version` from now on."""
        self._loop.engine.serve(version)
