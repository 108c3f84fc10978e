"""Records which member has which version of the weights, and prevents that a joining member ends up with an old one.

A publication sends a new version to the members that had weights when it began. A member that pulls weights during a publication may get
the previous version, and the publication does not send it the new one. Pulls and publications do not exclude each other by a lock. Instead,
a member that has pulled waits until no publication is in progress, and pulls again if a newer version was committed.

A member proves a version by an acknowledgement: it reports the digest of the weights manifest that it has loaded and checked.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rl_core.api.errors import DeadlineExceeded
from rl_core.runner.roster import Identity
from rl_core.workers.member import Member


class MemberVersions:
    """The newest version that each member has proved. Thread-safe."""

    def __init__(self, on_proved: Callable[[Sequence[Identity], int], None]) -> None:
        """`on_proved(processes, version)` is called with each version that members prove, in the order in which they prove it."""
        self._on_proved = on_proved
        self._changed = threading.Condition()
        """Guards the fields below. It is held while `on_proved` runs, so that two versions of a member are reported in order."""
        self._publications = 0
        """Number of publications in progress."""
        self._committed = -1
        """Newest version that was published, or that a member has proved."""
        self._proved_versions: dict[Identity, int] = {}
        """Version that each process proved last."""

    @property
    def committed(self) -> int:
        """Return the newest version that was published, -1 before the first one."""
        return self._committed

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Mark `version` as being published while the block runs; it counts as committed if the block ends without an error.

        Members may pull during the block. `await_current` waits for its end.
        """
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
        """Return those of `members` that can receive a new version: they take calls and have weights already.

        A member without weights is joining; it pulls the newest version by itself. One that has just pulled may still be READY here, because
        its heartbeat comes later.
        """
        with self._changed:
            return [m for m in members if m.state.constructed and (m.name, m.incarnation) in self._proved_versions]

    def proved(self, processes: Sequence[Identity], version: int) -> None:
        """Record that `processes` have proved `version`. Ignored for a process that has proved a newer version."""
        with self._changed:
            newer = [process for process in processes if self._proved_versions.get(process, -1) <= version]
            self._proved_versions |= dict.fromkeys(newer, version)
            self._committed = max(self._committed, version)
            self._on_proved(newer, version)

    def version_of(self, process: Identity) -> int | None:
        """Return the newest version that `process` has proved; None if it has no weights."""
        with self._changed:
            return self._proved_versions.get(process)

    def forget(self, process: Identity) -> None:
        """Forget a lost process: it receives no version until it has pulled and proved one again."""
        with self._changed:
            self._proved_versions.pop(process, None)

    def await_current(self, process: Identity, *, timeout: float) -> bool:
        """Wait until no publication is in progress, then return whether `process` has the newest committed version.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._publications, timeout):
                raise DeadlineExceeded(
                    f"{process[0]} has pulled weights; the publication under way must end within {timeout:.0f} s"
                )
            return self._proved_versions.get(process, -1) >= self._committed
