"""Which member holds which version of the weights, so that a member that pulls and a publication do not miss each other.

A publication sends a version to the members that hold weights when it begins. A member that pulls at that time gets the version before and
is not sent the new one. No lock is held over a pull or a publication. Instead a member that has pulled waits until no publication is under
way, and pulls again if a newer version has been committed meanwhile.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rl_core.api.errors import DeadlineExceeded
from rl_core.messages.members import MemberState
from rl_core.runner.roster import Identity
from rl_core.workers.member import Member

RECEIVES = frozenset({MemberState.SERVING, MemberState.UPDATING})
"""States in which a member that holds weights can be sent a version."""


class VersionHandover:
    """Records the versions that members have proved. Any thread."""

    def __init__(self, on_proved: Callable[[Sequence[Identity], int], None]) -> None:
        """`on_proved(processes, version)` is called with each version that members prove, in the order in which they prove it."""
        self._on_proved = on_proved
        self._changed = threading.Condition()
        """Guards the fields below. It is held while `on_proved` runs, so that two versions of a member are reported in order."""
        self._publications = 0
        """Publications under way."""
        self._committed = -1
        """Newest version that a member or a publication has proved."""
        self._held: dict[Identity, int] = {}
        """Version that each process proved last."""

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Publish `version` while the block runs. Pulls go on meanwhile; members that pulled wait for the end of the block."""
        with self._changed:
            self._publications += 1
        try:
            yield
            with self._changed:
                self._committed = max(self._committed, version)
        finally:
            with self._changed:
                self._publications -= 1
                self._changed.notify_all()

    def receivers(self, members: Iterable[Member]) -> list[Member]:
        """Return those of `members` that hold weights, and so can be sent a version."""
        with self._changed:
            return [m for m in members if m.state in RECEIVES and (m.name, m.incarnation) in self._held]

    def proved(self, processes: Sequence[Identity], version: int) -> None:
        """Record that `processes` hold `version`. A process that has proved a newer version keeps that one."""
        with self._changed:
            newer = [process for process in processes if self._held.get(process, -1) <= version]
            self._held |= dict.fromkeys(newer, version)
            self._committed = max(self._committed, version)
            self._on_proved(newer, version)

    def version_of(self, process: Identity) -> int | None:
        """Return the version that `process` proved last; None when it holds none."""
        with self._changed:
            return self._held.get(process)

    def forget(self, process: Identity) -> None:
        """Forget a process that is lost: it is sent no version until it has pulled one again."""
        with self._changed:
            self._held.pop(process, None)

    def is_current(self, process: Identity, *, timeout: float) -> bool:
        """Wait until no publication is under way, then return whether `process` holds the newest version.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._publications, timeout):
                raise DeadlineExceeded(
                    f"{process[0]} has pulled weights; the publication under way must end within {timeout:.0f} s"
                )
            return self._held.get(process, -1) >= self._committed
