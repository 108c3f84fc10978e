"""The device lease: which kind of work uses the devices that groups share. One kind of work has them at a time.

    free -> handing over -> in use -> idle, still the last user's -> handing over -> in use -> ...

Devices that nobody uses stay as they are until another kind of work asks for them: generating twice in a row moves nothing. A request for
the kind of work that is under way is granted at once, ahead of requests for other kinds: a rollout that joins during generation must not
wait behind the training that waits for the generated groups.
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
        """Return the groups whose processes have memory on the devices during this use."""
        return {Use.GENERATING: (ROLLOUT,), Use.SYNCING: (ACTOR, ROLLOUT), Use.TRAINING: (ACTOR,)}[self]


HandOver = Callable[[Use | None, Use, int], None]
"""(the use so far or None where it is not known, the next one, its token): offloads the memory of one group and onloads that of the other."""


class DeviceLease:
    """Grants the devices of one run. Any thread."""

    def __init__(self, hand_over: HandOver, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`hand_over` runs in the thread that asks, with nobody in a use; `seconds` bounds a wait for the devices."""
        self._hand_over, self._seconds, self._clock = hand_over, seconds, clock
        self._changed = threading.Condition()
        """Guards the fields below; notified when a user leaves and after each hand-over. Free during a hand-over, for `/status`."""
        self._users = 0
        self._shared_until: list[float] = []
        """Clock at which each of those that share the use must be done."""
        self._moving = False
        self.use: Use | None = None
        """The kind of work that has the devices; None before the first, during a hand-over, and after one that failed."""
        self.token = 0
        """Fencing token, which rises with each hand-over: requests with an older token are stale."""
        self.since = clock()
        """When the last hand-over began."""
        self.moved_seconds = 0.0
        """Seconds that the last hand-over took."""

    @contextmanager
    def held(self, use: Use) -> Iterator[None]:
        """Use the devices for `use` while the block runs.

        Raises DeadlineExceeded naming the holder, and what the hand-over raises. After a failed hand-over nobody has the devices, and the
        next hand-over moves everything.
        """
        with self._changed:
            self._wait(lambda: not self._moving and (not self._users or self.use is use), use)
            before = self.use
            self._users += 1
            if before is not use:
                self._moving, self.use = True, None
                self.token += 1
                self.since = self._clock()
        try:
            if before is not use:
                self._move(before, use)
            yield
        finally:
            self._leave()

    @contextmanager
    def shared(self, use: Use, *, seconds: float) -> Iterator[None]:
        """Use the devices for `use` while the block runs, once somebody else got them for it. Raises DeadlineExceeded.

        The block must end within `seconds`. Others that wait for the devices wait that much longer: a member that joins may delay the
        run, but must not end it.
        """
        with self._changed:
            self._wait(lambda: self.use is use, use)
            self._users += 1
            self._shared_until.append(until := self._clock() + seconds)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._shared_until.remove(until)
            self._leave()

    def held_seconds(self) -> float:
        """Return the seconds since the hand-over to the present use began."""
        return self._clock() - self.since

    def _move(self, before: Use | None, use: Use) -> None:
        done = False
        try:
            self._hand_over(before, use, self.token)
            done = True
        finally:
            with self._changed:
                self._moving, self.use = False, use if done else None
                self.moved_seconds = self._clock() - self.since
                self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], use: Use) -> None:
        began = self._clock()
        while not free():
            end = max([began, *self._shared_until]) + self._seconds
            left = end - self._clock()
            if left <= 0:
                holder = "a hand-over" if self._moving else self.use or "nobody"
                raise DeadlineExceeded(
                    f"the devices must be free for {use} within {self._seconds:.0f} s, got them held by {holder} for "
                    f"{self.held_seconds():.0f} s; raise runtime.deadlines.waitReady, or look why it does not end"
                )
            self._changed.wait(left)
