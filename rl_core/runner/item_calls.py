"""Calls a method of an elastic group once for each of many items. The items of a lost member are given to other members."""

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rl_core.api.errors import DeadlineExceeded, WorkerLost
from rl_core.messages.calls import MethodResult
from rl_core.workers.cluster import Cluster

LOOK = 0.25
"""Seconds between two checks of the members and of requests to stop."""
MOST_LOSSES = 5
"""Number of members lost with the same item after which the item is given up, because the item itself may cause the losses."""


def call_each(
    cluster: Cluster,
    group: str,
    method: str,
    items: Sequence[Any],
    *,
    seconds: float,
    shortage: float | None,
    at: Callable[[], object],
) -> list[Any]:
    """Call `method(item)` of a member for each item, and return the results in the order of the items.

    Each member works on one item at a time. If a member is lost, its item is given to another one, so the method may run twice for an item.

    - `seconds`: limit of each call.
    - `shortage`: seconds for which the group may have no member; None means no limit.
    - `at()`: called while the calls run, at least every LOOK seconds; an exception that it raises ends the calls.

    Raises the error of the method, WorkerLost for an item with which MOST_LOSSES members were lost, and DeadlineExceeded.
    """
    calls = _ItemCalls(cluster, group, method, items, seconds=seconds)
    try:
        missing_since: float | None = None
        while calls.begin():
            at()
            if calls.running:
                missing_since = None
                calls.collect()
                continue
            missing_since = time.monotonic() if missing_since is None else missing_since
            if shortage is not None and time.monotonic() - missing_since > shortage:
                raise DeadlineExceeded(f"{group}.{method} must find a member within {shortage:.0f} s, got none")
            cluster.hub.wait_changed(cluster.hub.revision, LOOK)
        return calls.results
    finally:
        calls.cancel()


class _ItemCalls:
    """The items of one `call_each`: the waiting ones, the running calls, and the results."""

    def __init__(self, cluster: Cluster, group: str, method: str, items: Sequence[Any], *, seconds: float) -> None:
        self.results: list[Any] = [None] * len(items)
        self.running: dict[Future[MethodResult], tuple[int, str]] = {}
        """(index of the item, name of the member) by call."""
        self._cluster, self._group, self._method, self._items, self._seconds = cluster, group, method, items, seconds
        self._waiting = deque(range(len(items)))
        self._losses = [0] * len(items)

    def begin(self) -> bool:
        """Start calls on the members that have no item. Returns whether any item is still waiting or running."""
        busy = {name for _, name in self.running.values()}
        for member in self._cluster.members(self._group):
            if not self._waiting:
                break
            if member.name in busy or not member.state.constructed:
                continue
            index = self._waiting.popleft()
            call = self._cluster.submit(member.name, self._method, (self._items[index],), {}, timeout=self._seconds)
            self.running[call.future] = (index, member.name)
        return bool(self._waiting or self.running)

    def collect(self) -> None:
        """Wait until a call has ended, at most LOOK seconds, and store the results of the calls that have ended."""
        done, _ = concurrent.futures.wait(self.running, timeout=LOOK, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            index, member = self.running.pop(future)
            try:
                self.results[index] = future.result().value
            except WorkerLost as error:
                self._losses[index] += 1
                if self._losses[index] >= MOST_LOSSES:
                    raise WorkerLost(
                        f"{self._group}.{self._method} was lost with {MOST_LOSSES} members for item {index}, the last: {member}: {error}"
                    ) from error
                self._waiting.appendleft(index)

    def cancel(self) -> None:
        """Cancel the calls that have not ended."""
        for future in self.running:
            future.cancel()
