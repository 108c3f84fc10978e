"""Calls from a worker to members of another group. A call goes to the member with the fewest calls in flight, and is repeated on another
member if that one is lost.

The group must name the caller's group in `callers`, and its worker class must name the method in `peer_methods`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rl_core.api.errors import DeadlineExceeded, WorkerLost
from rl_core.messages.members import MemberView
from rl_core.workers.worker import Worker

MOST_LOSSES = 3
"""Number of members lost with the same call after which the call is given up, because the call itself may cause the losses."""
LOOK_SECONDS = 1.0
"""Longest time, in seconds, between two checks for a member while there is none."""


class MemberCaller:
    """Calls methods of members of other groups on behalf of the worker `worker`. Its coroutines may run on any event loop."""

    def __init__(self, worker: Worker, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._worker, self._clock = worker, clock
        self._in_flight: Counter[str] = Counter()
        """Number of calls in flight, by address of the member."""
        self.losses = 0
        """Number of times that a call was repeated because its member was lost."""

    async def call(self, group: str, method: str, /, *args: Any, seconds: float) -> Any:
        """Return `method(*args)` of a member of `group`. The method may run twice if a member is lost.

        `seconds` limits the wait for a member and for the answer together. Raises the error of the method, WorkerLost when MOST_LOSSES
        members were lost with this call, and DeadlineExceeded.
        """
        deadline, losses = self._clock() + seconds, 0
        while True:
            with self._worker.waiting(f"{group}.{method}", group):
                member = await self._free_member(group, method, deadline, seconds)
                self._in_flight[member.address] += 1
                try:
                    client, remaining = self._worker.peer(member.address), deadline - self._clock()
                    return await client.call(method, *args, timeout=max(remaining, 0.0))
                except WorkerLost as error:
                    losses += 1
                    self.losses += 1
                    if losses >= MOST_LOSSES:
                        raise WorkerLost(
                            f"{group}.{method} was lost with {losses} members, the last {member.name}: {error}"
                        ) from error
                finally:
                    self._in_flight[member.address] -= 1
                    self._in_flight += Counter()  # Removes the addresses without calls.

    async def _free_member(self, group: str, method: str, deadline: float, seconds: float) -> MemberView:
        """Return the member with the fewest calls in flight; waits until there is one."""
        while True:
            ready = [m for m in self._worker.members(group) if m.state.constructed]
            if ready:
                return min(ready, key=lambda m: (self._in_flight[m.address], m.rank))
            remaining = deadline - self._clock()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"{group}.{method} must find a member within {seconds:.0f} s, got none; the job needs a group {group} "
                    f"that names {self._worker.group_name} in callers"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, LOOK_SECONDS)):
                    await self._worker.view_changed()
