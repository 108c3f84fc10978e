"""`pausing`: wraps a weight target so that the rollout worker pauses before the engine is prepared for new weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rl_core.weights.target import InPlaceTarget, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor

Pause = Callable[[float], Awaitable[None]]
"""`pause(deadline)` stops the admission of rows and returns once nothing generates, within `deadline` seconds from the call."""


class PausingTarget:
    """A `WeightTarget` that wraps that of an engine and pauses the worker first."""

    def __init__(self, target: WeightTarget, pause: Pause) -> None:
        """Call `pause` before `target` is prepared."""
        self._target = target
        self._pause = pause

    async def prepare(self, deadline: float) -> None:
        """Pause the worker, then prepare the engine, within `deadline` seconds from the call."""
        await self._pause(deadline)
        await self._target.prepare(deadline)

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of the engine's tensors."""
        return self._target.names_and_shapes()

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load weights into the engine."""
        self._target.load(tensors, version)

    async def resume(self, version: int, digest: str) -> None:
        """Let the engine generate with `version`."""
        await self._target.resume(version, digest)


class PausingInPlaceTarget(PausingTarget):
    """A `PausingTarget` around an engine whose parameters the receiver may write in place."""

    def __init__(self, target: WeightTarget, pause: Pause, destinations: Callable[[], Mapping[str, Tensor]]) -> None:
        """Call `pause` before `target`, whose parameters are `destinations()`, is prepared."""
        super().__init__(target, pause)
        self.destinations = destinations


def pausing(target: WeightTarget, pause: Pause) -> WeightTarget:
    """Return `target`, with `pause` called before it is prepared."""
    if isinstance(target, InPlaceTarget):
        return PausingInPlaceTarget(target, pause, target.destinations)
    return PausingTarget(target, pause)
