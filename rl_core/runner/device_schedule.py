"""The device schedule: what happens to the devices before and after each kind of work of a program.

A program writes `with schedule.generating(): ...` and never asks where its groups run. Groups with devices of their own need nothing.
Groups that share devices take the device lease here and move weights, caches and optimizer state out of each other's way.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class DeviceSchedule(Protocol):
    """Implemented by `DisaggregatedSchedule`, `OffloadingSchedule` and `time_sharing.ColocatedSchedule`.

    Any thread may enter a block, and blocks of one kind may overlap.
    """

    def generating(self) -> AbstractContextManager[object]:
        """Let rollouts generate while the block runs."""
        ...

    def training(self) -> AbstractContextManager[object]:
        """Let actors score, train, save and load while the block runs."""
        ...

    def syncing(self) -> AbstractContextManager[object]:
        """Let weights travel while the block runs."""
        ...

    def joining(self, name: str) -> AbstractContextManager[object]:
        """Let the joining member `name` use its devices while the block runs: to build its engine, or to pull weights.

        Where devices are shared, the block begins once they are used for generation.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return `offload/*` and `onload/*` since the last call: bytes summed over the actor ranks, seconds of the slowest rank."""
        ...

    def devices(self) -> dict[str, Any] | None:
        """Return who holds the shared devices, for `/status`; None where no devices are shared."""
        ...


class DisaggregatedSchedule:
    """For groups that each have devices of their own: nothing moves."""

    def generating(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def training(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def syncing(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def joining(self, name: str) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """Return none: nothing moves."""
        return {}

    def devices(self) -> None:
        """Return None: no device is shared."""
        return None


class Moves:
    """Sums what the actor's ranks move to and from their devices. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_sums`: the content check moves memory on its own thread while the loop reads the metrics."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, ranks: Iterable[Mapping[str, float]]) -> None:
        """Add one move, given by the answers of all ranks: bytes are summed, of the seconds the largest counts."""
        several = list(ranks)
        with self._lock:
            for name in {name for moved in several for name in moved}:
                values = [moved.get(name, 0.0) for moved in several]
                self._sums[name] += max(values) if name.endswith("seconds") else sum(values)

    def take(self) -> dict[str, float]:
        """Return the sums and reset them."""
        with self._lock:
            taken = dict(self._sums)
            self._sums.clear()
        return taken


class OffloadingSchedule(DisaggregatedSchedule):
    """For a trainer with devices of its own that keeps on them only what the present work needs (`actor.offload`)."""

    def __init__(self, resident: Set[str], *, actor: Any, seconds: float) -> None:
        """`resident`: what stays on the devices of the group `actor` whatever the work; `seconds` bounds one move."""
        self._resident, self._actor, self._seconds = resident, actor, seconds
        self._lock = threading.Lock()
        """Guards `_working`. It is held during a move, so that an offload for generation cannot undo the onload of a training that begins."""
        self._working = 0
        """Training and syncing blocks that are running."""
        self._moves = Moves()

    def generating(self) -> AbstractContextManager[object]:
        """Offload everything that training does not need, unless the trainer works for another block."""
        with self._lock:
            if not self._working:
                self._occupy(self._resident)
        return nullcontext()

    def training(self) -> AbstractContextManager[object]:
        """Onload weights and gradients. The optimizer step onloads the optimizer state itself."""
        return self._work(self._resident | {"weights", "gradients"})

    def syncing(self) -> AbstractContextManager[object]:
        """Onload the weights."""
        return self._work(self._resident | {"weights"})

    def metrics(self) -> dict[str, float]:
        """Return what moved since the last call."""
        return self._moves.take()

    @contextmanager
    def _work(self, parts: Set[str]) -> Iterator[None]:
        with self._lock:
            self._working += 1
            self._occupy(parts)
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    def _occupy(self, parts: Set[str]) -> None:
        self._moves.add(self._actor.occupy(sorted(parts)).wait(self._seconds))
