"""Finds cycles of workers that wait for messages of each other, from the waits that their heartbeats report. Pure; used by the hub."""

from collections.abc import Callable

from rl_core.workers.member import Member

MESSAGE = "a message"
"""What a worker reports that it waits for in a receive that may be part of a cycle."""
LEAST_SECONDS = 3.0
"""Seconds that each member of a cycle must have waited. A message that was sent already arrives earlier."""


class ReceiveCycles:
    """Answers members that ask whether their receive is part of a cycle.

    The cycle is found when its first member asks, and stored for the others: when they ask, the wait of the first has ended already.
    """

    def __init__(self, get: Callable[[str], Member | None], *, clock: Callable[[], float]) -> None:
        """`get(name)` returns a member; `clock` returns seconds."""
        self._get = get
        self._clock = clock
        self._unread: dict[str, tuple[float, list[str]]] = {}
        """(time at which the cycle was found, cycle) by member; an entry is removed when the member asks."""

    def ask(self, name: str, waited: float) -> list[str]:
        """Return the members of the cycle of which `name` is one, each of which waits for the next; empty if there is none.

        `waited` is the number of seconds for which `name` has waited.
        """
        found_at, cycle = self._unread.pop(name, (0.0, []))
        if cycle and self._clock() - waited < found_at:
            return cycle
        cycle = self._search(name)
        for name_in_cycle in cycle[1:]:
            self._unread[name_in_cycle] = (self._clock(), cycle)
        return cycle

    def _search(self, name: str) -> list[str]:
        cycle, following = [name], self._awaited(name)
        while following is not None and following not in cycle:
            cycle.append(following)
            following = self._awaited(following)
        return cycle if following == name else []

    def _awaited(self, name: str) -> str | None:
        member = self._get(name)
        wait = None if member is None or member.state.gone else member.wait
        return wait.on if wait is not None and wait.what == MESSAGE and wait.since_seconds >= LEAST_SECONDS else None
