"""The device lease: grants shared devices to one kind of work at a time (generating, syncing or training).

    free -> handing over -> in use -> idle, still the last user's -> handing over -> in use -> ...

Devices that are released stay as they are until another kind of work requests them: generating twice in a row moves no memory. Waiting
requests are not served in order. A request for the kind of work that is in progress is granted at once, even if another kind waits: a
rollout that joins during generation must not wait for training, which itself waits for the generated groups.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from rl_core.api.errors import DeadlineExceeded
from rl_core.plan.groups import ACTOR, ROLLOUT


class Use(StrEnum):
    """What shared devices are used for."""

    GENERATING = "generating"
    SYNCING = "syncing"
    TRAINING = "training"

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the worker groups whose processes have memory on the devices during this use."""
        return {Use.GENERATING: (ROLLOUT,), Use.SYNCING: (ACTOR, ROLLOUT), Use.TRAINING: (ACTOR,)}[self]


HandOver = Callable[[Use | None, Use, int], None]
"""Called as hand_over(previous use, next use, fencing token). It offloads one worker group and onloads the other. The previous use is
None if it is not known.
"""


class DeviceLease:
    """Grants the shared devices of one run. Thread-safe."""

    def __init__(self, hand_over: HandOver, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`hand_over` is called in the requesting thread, while nobody uses the devices.

        A request waits at most `seconds` for the devices.
        """
        self._hand_over, self._seconds, self._clock = hand_over, seconds, clock
        self._changed = threading.Condition()
        """Guards the fields below; notified when a user leaves and after each hand-over. Not held during a hand-over, so that `/status`
        can be read.
        """
        self._users = 0
        self._shared_until: list[float] = []
        """Clock times, in seconds, at which the blocks of `shared` must end."""
        self._moving = False
        self.use: Use | None = None
        """The kind of work that has the devices; None before the first, during a hand-over, and after one that failed."""
        self.token = 0
        """Fencing token, which rises with each hand-over: requests with an older token are stale."""
        self.since = clock()
        """Clock, in seconds, at which the last hand-over began."""
        self.moved_seconds = 0.0
        """Seconds that the last hand-over took."""

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """Use the devices for `use` while the block runs; waits for other uses to end, and hands the devices over if needed.

        Raises DeadlineExceeded with the current holder if the devices are not free in time, and whatever the hand-over raises. After a
        failed hand-over nobody has the devices, and the next one moves all memory.
        """
        with self._changed:
            self._wait(lambda: not self._moving and (not self._users or self.use is use), use)
            previous = self.use
            self._users += 1
            if previous is not use:
                self._moving, self.use = True, None
                self.token += 1
                self.since = self._clock()
        try:
            if previous is not use:
                self._move(previous, use)
            yield
        finally:
            self._leave()

    @contextmanager
    def shared(self, use: Use, *, seconds: float) -> Iterator[None]:
        """Join a use that another caller of `using` has begun; waits until the devices are used for `use`.

        The block must end within `seconds`. The deadlines of other waiting requests are extended until then: a joining member may delay the
        run, but must not make it fail. Raises DeadlineExceeded if the use does not begin in time.
        """
        with self._changed:
            self._wait(lambda: self.use is use, use)
            self._users += 1
            self._shared_until.append(end := self._clock() + seconds)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._shared_until.remove(end)
            self._leave()

    def seconds_in_use(self) -> float:
        """Return the seconds since the last hand-over began."""
        return self._clock() - self.since

    def _move(self, previous: Use | None, use: Use) -> None:
        succeeded = False
        try:
            self._hand_over(previous, use, self.token)
            succeeded = True
        finally:
            with self._changed:
                self._moving, self.use = False, use if succeeded else None
                self.moved_seconds = self._clock() - self.since
                self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], use: Use) -> None:
        start = self._clock()
        while not free():
            end = max([start, *self._shared_until]) + self._seconds
            remaining = end - self._clock()
            if remaining <= 0:
                holder = "a hand-over" if self._moving else self.use or "nobody"
                raise DeadlineExceeded(
                    f"the devices must be free for {use} within {self._seconds:.0f} s, got them held by {holder} for "
                    f"{self.seconds_in_use():.0f} s; raise runtime.deadlines.waitReady, or look why it does not end"
                )
            self._changed.wait(remaining)
