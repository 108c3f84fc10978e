"""Cancels a training step between two micro-batches: the runner requests it, the ranks agree, and the step leaves no trace."""

from rl_core.actors.backend import StepCancelled
from rl_core.actors.ranks import Ranks
from rl_core.checkpoint.state import capture_rng, restore_rng


class Cancellation:
    """One rank's part of the cancellation. The RPC loop calls `request` while the training thread computes; that thread calls the rest.

    There is no lock: `_requested` is a single flag, and a step that misses it sees it before its next micro-batch. A request on one rank
    is enough. It does not affect a step that begins later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._requested = False
        self._random = capture_rng()

    def begin(self) -> None:
        """Begin a step: clear earlier requests and save the random state."""
        self._requested = False
        self._random = capture_rng()

    def request(self) -> None:
        """Request that the step is cancelled before its next micro-batch. May be called on any thread."""
        self._requested = True

    def check(self) -> None:
        """Raise StepCancelled on all ranks if some rank has a request. Collective: reduces one number."""
        if self._ranks.largest(int(self._requested)):
            raise StepCancelled

    def restore(self) -> None:
        """Restore the random state of the beginning of the step, so that repeating it draws the same numbers, and clear the request."""
        restore_rng(self._random)
        self._requested = False
