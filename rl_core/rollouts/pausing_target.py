"""`pausing`: wraps a weight target so that the rollout worker pauses before the engine is prepared for new weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rl_core.weights.target import InPlaceTarget, RankTarget, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor

    from rl_core.messages.weights import DeviceSource, GroupSource, SharedSource
    from rl_core.weights.assembly import Assembly

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


class PausingRankTarget(PausingTarget):
    """A `PausingTarget` around an engine whose processes read a version themselves."""

    def __init__(self, target: WeightTarget, pause: Pause, engine: RankTarget) -> None:
        """Call `pause` before `target`, which is also `engine`, is prepared."""
        super().__init__(target, pause)
        self._engine = engine

    @property
    def ranks(self) -> int:
        """Return the number of the engine's processes."""
        return self._engine.ranks

    @property
    def group(self) -> str:
        """Return the key of their process group."""
        return self._engine.group

    @property
    def group_ended(self) -> bool:
        """Return whether the last load failed because of the process group or the mapping."""
        return self._engine.group_ended

    @property
    def opened(self) -> tuple[int, ...]:
        """Return which of them have opened their handle in the last load."""
        return self._engine.opened

    def load_source(self, source: SharedSource | DeviceSource | GroupSource, assembly: Assembly) -> None:
        """Let each process of the engine read the version from `source`."""
        self._engine.load_source(source, assembly)


def pausing(target: WeightTarget, pause: Pause) -> WeightTarget:
    """Return `target`, with `pause` called before it is prepared."""
    if isinstance(target, InPlaceTarget):
        return PausingInPlaceTarget(target, pause, target.destinations)
    if isinstance(target, RankTarget):
        return PausingRankTarget(target, pause, target)
    return PausingTarget(target, pause)
