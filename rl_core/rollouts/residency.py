"""`EngineResidency`: moves the parts of an engine on and off a device that it shares with the trainer, as the device lease says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import get_args

from rl_core.rollouts.engine import Part, Residency
from rl_core.rollouts.rollout_loop import RolloutLoop

ALL_PARTS: frozenset[Part] = frozenset(get_args(Part))


class EngineResidency:
    """Moves the parts of one engine. At first all are on the device. Used on the worker's event loop.

    The device lease is the runner's turn-taking between trainer and rollouts on shared accelerators. Its number (token) rises with each
    change.
    """

    def __init__(self, residency: Residency, loop: RolloutLoop) -> None:
        """Move parts with `residency`. `loop` returns the groups in flight before a part is offloaded."""
        self._residency, self._loop = residency, loop
        self._token = -1
        """Newest token of the device lease under which parts were moved."""
        self._lock = asyncio.Lock()
        """Serializes moves: the next one may be requested while one still copies."""
        self.parts = ALL_PARTS

    @property
    def complete(self) -> bool:
        """Whether all parts are on the device, so that the engine may generate."""
        return self.parts == ALL_PARTS

    def reset_token(self) -> None:
        """Accept any number of the device lease again, because a restarted runner counts from the beginning."""
        self._token = -1

    async def move_to(self, parts: Collection[Part], token: int) -> None:
        """Keep exactly `parts` on the device. Does nothing if `token` is older than that of the last call.

        If a part is offloaded, groups in flight are returned to the runner first.
        """
        resident = ALL_PARTS & set(parts)
        async with self._lock:
            if token < self._token:
                return
            self._token = token
            if resident != ALL_PARTS:
                await self._loop.pause(0.0)
                self.parts = resident
                await asyncio.to_thread(self._residency.offload, sorted(ALL_PARTS - resident))
            await asyncio.to_thread(self._residency.onload, sorted(resident))
            self.parts = resident
