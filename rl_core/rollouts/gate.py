"""The engine's place for weights behind the worker's gate: the engine is prepared only when nothing generates any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rl_core.weights.target import InPlaceTarget, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor


class GatedTarget:
    """A `WeightTarget` around an engine's."""

    def __init__(self, target: WeightTarget, pause: Callable[[float], Awaitable[None]]) -> None:
        """`pause(deadline)` lets nothing new begin and returns once nothing generates."""
        self._target = target
        self._pause = pause

    async def prepare(self, deadline: float) -> None:
        """Empty the worker, then prepare the engine."""
        await self._pause(deadline)
        await self._target.prepare(deadline)

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return what the engine must be given."""
        return self._target.names_and_shapes()

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give the engine its weights."""
        self._target.load(tensors, version)

    async def resume(self, version: int, digest: str) -> None:
        """Let the engine serve `version`."""
        await self._target.resume(version, digest)


class GatedInPlaceTarget(GatedTarget):
    """A `GatedTarget` around one whose parameters the receiver may write itself."""

    def __init__(self, target: WeightTarget, pause: Callable[[float], Awaitable[None]]) -> None:
        """`target` is an `InPlaceTarget` too."""
        super().__init__(target, pause)
        assert isinstance(target, InPlaceTarget)
        self.destinations = target.destinations


def gated(target: WeightTarget, pause: Callable[[float], Awaitable[None]]) -> WeightTarget:
    """Return `target` behind `pause(deadline)`."""
    return (GatedInPlaceTarget if isinstance(target, InPlaceTarget) else GatedTarget)(target, pause)
