"""The port through which placement acts on a program: what happens to the devices before and after each kind of work.

A program writes `with phases.generating(): ...` and never asks where its roles run (invariant I6). Roles with devices of their own
need nothing; roles that share devices take the device lease here and move weights, caches and optimizer out of each other's way.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Phases(Protocol):
    """Implemented by `DisaggregatedPhases`, `OffloadingPhases` and `time_sharing.ColocatedPhases`. Any thread; blocks of one kind may overlap."""

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
        """Let the rollout `name` build its engine and pull weights while the block runs, in a time in which rollouts generate."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return `offload/*` and `onload/*` since the last call: bytes over all actor ranks, seconds of the slowest each time."""
        ...

    def devices(self) -> dict[str, Any] | None:
        """Return who holds the devices that roles share, for `/status`; None where none are shared."""
        ...


class DisaggregatedPhases:
    """Every role has devices of its own: there is nothing to give up or to fetch back."""

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
    """What the actor's ranks moved to and from their devices since it was last asked for. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_sums`: the content check moves beside the loop, which reads the metrics."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, ranks: Iterable[Mapping[str, float]]) -> None:
        """Add the answers of all ranks to one move: the bytes of all, the seconds of the slowest."""
        several = list(ranks)
        with self._lock:
            for name in {name for moved in several for name in moved}:
                values = [moved.get(name, 0.0) for moved in several]
                self._sums[name] += max(values) if name.endswith("seconds") else sum(values)

    def take(self) -> dict[str, float]:
        """Return the sums and begin anew."""
        with self._lock:
            taken = dict(self._sums)
            self._sums.clear()
        return taken


class OffloadingPhases(DisaggregatedPhases):
    """Devices of its own, on which the trainer keeps only what the phase needs (`actor.offload`)."""

    def __init__(self, resident: Set[str], *, actor: Any, seconds: float) -> None:
        """`resident`: what stays on the devices of the group `actor` in every phase; `seconds` bounds one move."""
        self._resident, self._actor, self._seconds = resident, actor, seconds
        self._lock = threading.Lock()
        """Guards `_working`, and the order of moves: a move for generation must not overtake the training that begins meanwhile."""
        self._working = 0
        """Blocks of training and syncing that run."""
        self._moves = Moves()

    def generating(self) -> AbstractContextManager[object]:
        """Have away what may go, unless the trainer is at work for another block."""
        with self._lock:
            if not self._working:
                self._occupy(self._resident)
        return nullcontext()

    def training(self) -> AbstractContextManager[object]:
        """Have weights and gradients there; the optimizer step brings the moments itself."""
        return self._work(self._resident | {"weights", "gradients"})

    def syncing(self) -> AbstractContextManager[object]:
        """Have the weights there."""
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
