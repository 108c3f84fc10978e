"""Calls a method of an elastic group once for each of many items, whoever of the group is there, and again where a member is lost."""

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
"""Seconds between two looks at the members and at requests to stop."""
MOST_LOSSES = 5
"""Members that may be lost with one item before the item is given up: it may be what ends them."""
LEAVING = ("suspect", "draining")
"""States of a member that holds its worker and gets no new item."""


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
    """Return `method(item)` of each item, in the order of the items.

    Each member has one item at a time. The item of a member that is lost goes to another member, so a method may run twice for an item.
    `seconds` bounds each call; `shortage` is how long the group may have no member (None: without a bound). `at()` is called between two
    looks and may end the calls by raising. Raises what the method raised, WorkerLost for an item with which MOST_LOSSES members were
    lost, and DeadlineExceeded.
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
    """The items of one `call_each`: which wait, which run where, and the results."""

    def __init__(self, cluster: Cluster, group: str, method: str, items: Sequence[Any], *, seconds: float) -> None:
        self.results: list[Any] = [None] * len(items)
        self.running: dict[Future[MethodResult], tuple[int, str]] = {}
        """Index of the item and name of the member, by call."""
        self._cluster, self._group, self._method, self._items, self._seconds = cluster, group, method, items, seconds
        self._waiting = deque(range(len(items)))
        self._losses = [0] * len(items)

    def begin(self) -> bool:
        """Give items to the members that have none; return whether any item is left, waiting or running."""
        busy = {name for _, name in self.running.values()}
        for member in self._cluster.members(self._group):
            if not self._waiting:
                break
            if member.name in busy or not member.state.constructed or member.state in LEAVING:
                continue
            index = self._waiting.popleft()
            call = self._cluster.submit(member.name, self._method, (self._items[index],), {}, timeout=self._seconds)
            self.running[call.future] = (index, member.name)
        return bool(self._waiting or self.running)

    def collect(self) -> None:
        """Wait until a call has ended, LOOK seconds at most, and take the results."""
        ended, _ = concurrent.futures.wait(self.running, timeout=LOOK, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in ended:
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
