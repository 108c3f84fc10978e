"""Cancels a training step between two micro-batches. The runner requests it, all ranks agree, and the state before the step is restored."""

from rl_core.actors.backend import StepCancelled
from rl_core.actors.ranks import Ranks
from rl_core.checkpoint.state import capture_rng, restore_rng


class Cancellation:
    """One rank's part of the cancellation of a step.

    The RPC loop calls `request` while the training thread computes; that thread calls the other methods. No lock is needed: the request is
    a single flag, and a check that just misses it is followed by another one before the next micro-batch. A request on one rank is enough.
    It has no effect on a step that begins later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._requested = False
        self._random = capture_rng()

    def begin(self) -> None:
        """Start a step: drop earlier requests and remember the random state."""
        self._requested = False
        self._random = capture_rng()

    def request(self) -> None:
        """Request that the step is cancelled before its next micro-batch. May be called from any thread."""
        self._requested = True

    def check(self) -> None:
        """Raise StepCancelled on all ranks if any rank has a request. Collective: it reduces one integer."""
        if self._ranks.all_reduce_max(int(self._requested)):
            raise StepCancelled

    def restore(self) -> None:
        """Restore the random state that `begin` remembered, so that a repeated step draws the same numbers, and drop the request."""
        restore_rng(self._random)
        self._requested = False
