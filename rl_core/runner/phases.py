"""The port through which placement acts on a program: what happens to the devices before and after each kind of work.

A program writes `with phases.generating(): ...` and never asks where its roles run (invariant I6). Roles with devices of their own
need nothing; roles that share devices take the device lease here and move weights, caches and optimizer out of each other's way.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Phases(Protocol):
    """Implemented by `DisaggregatedPhases`."""

    def generating(self) -> AbstractContextManager[object]:
        """Let rollouts generate while the block runs."""
        ...

    def training(self) -> AbstractContextManager[object]:
        """Let actors score and train while the block runs."""
        ...

    def syncing(self) -> AbstractContextManager[object]:
        """Let weights travel while the block runs."""
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
