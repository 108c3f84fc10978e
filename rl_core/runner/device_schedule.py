"""The device schedule: moves memory to and from the devices before each kind of work of a program.

A program writes `with schedule.generating(): ...` and does not depend on the placement of its worker groups. With devices of their own the
groups need nothing. Groups that share devices acquire the device lease here, and offload their weights, caches and optimizer state for each
other.
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
        """Have the devices ready for rollouts to generate while the block runs."""
        ...

    def training(self) -> AbstractContextManager[object]:
        """Have the devices ready for actors to score, train, save and load while the block runs."""
        ...

    def syncing(self) -> AbstractContextManager[object]:
        """Have the devices ready for weights to be sent from actors to rollouts while the block runs."""
        ...

    def joining(self, name: str) -> AbstractContextManager[object]:
        """Have the devices ready for the joining member `name` to build its engine or to pull weights while the block runs.

        If devices are shared, waits until they are used for generation; raises DeadlineExceeded if that does not happen in time.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics `offload/*` and `onload/*` of the actor since the last call.

        Bytes are summed over the ranks; seconds are those of the slowest rank.
        """
        ...

    def devices(self) -> dict[str, Any] | None:
        """Return the holders of the shared devices for `/status`; None if no devices are shared."""
        ...


class DisaggregatedSchedule:
    """For worker groups that each have devices of their own: no memory is moved."""

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
        """Return an empty dict: no memory is moved."""
        return {}

    def devices(self) -> None:
        """Return None: no devices are shared."""
        return None


class MoveTotals:
    """Sums of the bytes and seconds of the moves of the actor's ranks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_sums`: the content check moves memory on its own thread while the loop reads the metrics."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, ranks: Iterable[Mapping[str, float]]) -> None:
        """Add one move from the answers of all ranks: their bytes are added up, and the seconds of the slowest rank count."""
        totals_of_ranks = list(ranks)
        with self._lock:
            for name in {name for totals in totals_of_ranks for name in totals}:
                values = [totals.get(name, 0.0) for totals in totals_of_ranks]
                self._sums[name] += max(values) if name.endswith("seconds") else sum(values)

    def take(self) -> dict[str, float]:
        """Return the sums and reset them."""
        with self._lock:
            sums = dict(self._sums)
            self._sums.clear()
        return sums


class OffloadingSchedule(DisaggregatedSchedule):
    """For an actor with devices of its own that offloads what the current work does not need (`actor.offload`)."""

    def __init__(self, resident: Set[str], *, actor: Any, seconds: float) -> None:
        """Offload and onload the memory of the worker group `actor`; one move takes at most `seconds`.

        `resident` names the parts that are never offloaded, of "weights", "gradients" and "optimizer".
        """
        self._resident, self._actor, self._seconds = resident, actor, seconds
        self._lock = threading.Lock()
        """Guards `_working`. It is held during a move, so that an offload for generation cannot undo the onload of a training that begins."""
        self._working = 0
        """Number of training and syncing blocks that are running."""
        self._moves = MoveTotals()

    def generating(self) -> AbstractContextManager[object]:
        """Offload all but the resident parts, unless a training or syncing block is running too."""
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
        """Return the sums since the last call."""
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
