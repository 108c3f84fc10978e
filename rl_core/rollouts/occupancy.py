"""What of an engine is on a device that it shares with the actor: moved as the runner says, under the token of the device lease."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import get_args

from rl_core.rollouts.engine import Part, Residency
from rl_core.rollouts.serving import PromptServer

ALL: frozenset[Part] = frozenset(get_args(Part))


class Occupancy:
    """The parts of one engine, all of them until the runner says otherwise. Lives on the worker's event loop."""

    def __init__(self, residency: Residency, server: PromptServer) -> None:
        """`server` gives back what is under way before a part goes."""
        self._residency, self._server = residency, server
        self._token = -1
        """Token of the lease under which parts were moved last."""
        self._turn = asyncio.Lock()
        """Lets one move run at a time: the next may be asked for while one still copies."""
        self.parts = ALL

    @property
    def whole(self) -> bool:
        """Return whether nothing is away, so that the engine may generate."""
        return self.parts == ALL

    def forget(self) -> None:
        """Count tokens anew: those of another runner."""
        self._token = -1

    async def become(self, parts: Collection[Part], token: int) -> None:
        """Have `parts` on the device and no others; nothing to do under a token older than the last.

        What is still in flight is given back first.
        """
        wanted = ALL & set(parts)
        async with self._turn:
            if token < self._token:
                return
            self._token = token
            if wanted != ALL:
                await self._make_room(wanted)
            await asyncio.to_thread(self._residency.onload, sorted(wanted))
            self.parts = wanted

    async def _make_room(self, kept: frozenset[Part]) -> None:
        await self._server.pause(0.0)
        self.parts = kept
        await asyncio.to_thread(self._residency.offload, sorted(ALL - kept))
