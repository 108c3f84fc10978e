"""The port through which placement acts on a program: what happens to the devices before and after each kind of work.

A program writes `with phases.generating(): ...` and never asks where its roles run (invariant I6). Roles with devices of their own
need nothing; roles that share devices take the device lease here and move weights, caches and optimizer out of each other's way.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Phases(Protocol):
    """Implemented by `DisaggregatedPhases` and `time_sharing.ColocatedPhases`. Any thread; blocks of one kind may overlap."""

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
