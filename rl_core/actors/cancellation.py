"""How a step is given up between two micro-batches: the runner asks, the ranks agree, nothing of the step stays."""

from rl_core.actors.backend import StepCancelled
from rl_core.actors.ranks import Ranks
from rl_core.checkpoint.state import capture_rng, restore_rng


class Cancellation:
    """One rank's part. `ask` is called on the loop of RPC handlers while the training thread computes; the rest by that thread.

    No lock: `_asked` is one flag, and a step that misses it sees it before its next micro-batch. It is enough that one rank was asked.
    A step that begins after the asking is not concerned.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._random = capture_rng()

    def begin(self) -> None:
        """Begin a step: forget what was asked before, remember the random state."""
        self._asked = False
        self._random = capture_rng()

    def ask(self) -> None:
        """Have the step given up at the next micro-batch that all ranks can agree on. Any thread."""
        self._asked = True

    def check(self) -> None:
        """Raise StepCancelled on all ranks when some rank was asked; collective, one number per call."""
        if self._ranks.largest(int(self._asked)):
            raise StepCancelled

    def restore(self) -> None:
        """Go back to the step's beginning: the random state as it was, so that the step done again draws the same numbers, nothing asked."""
        restore_rng(self._random)
        self._asked = False
