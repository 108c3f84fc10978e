"""`EngineResidency`: which parts of the engine are on a device that it shares with the actor, as the holder of the device lease says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import get_args

from rl_core.rollouts.engine import Part, Residency
from rl_core.rollouts.rollout_loop import RolloutLoop

ALL_PARTS: frozenset[Part] = frozenset(get_args(Part))


class EngineResidency:
    """Moves the parts of one engine; at first all are on the device. Used on the worker's event loop."""

    def __init__(self, residency: Residency, loop: RolloutLoop) -> None:
        """Move parts with `residency`; `loop` returns the groups in flight before a part is offloaded."""
        self._residency, self._loop = residency, loop
        self._token = -1
        """Newest token of the device lease under which parts were moved."""
        self._lock = asyncio.Lock()
        """Serializes moves: the next one may be requested while one still copies."""
        self.parts = ALL_PARTS

    @property
    def complete(self) -> bool:
        """Return whether all parts are on the device, so that the engine may generate."""
        return self.parts == ALL_PARTS

    def reset_token(self) -> None:
        """Accept any token again: a new runner counts its own."""
        self._token = -1

    async def move_to(self, parts: Collection[Part], token: int) -> None:
        """Offload and onload so that exactly `parts` are on the device; does nothing if `token` is older than the last one.

        Groups in flight are returned first if a part is offloaded.
        """
        wanted = ALL_PARTS & set(parts)
        async with self._lock:
            if token < self._token:
                return
            self._token = token
            if wanted != ALL_PARTS:
                await self._loop.pause(0.0)
                self.parts = wanted
                await asyncio.to_thread(self._residency.offload, sorted(ALL_PARTS - wanted))
            await asyncio.to_thread(self._residency.onload, sorted(wanted))
            self.parts = wanted
