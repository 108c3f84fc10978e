"""The bounds of one weight sync (trainers.md 9). Both sides derive the same numbers from the size of the model."""

from dataclasses import dataclass

SLOWEST_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds a receiver has for each phase; one that misses a phase is out of this sync.

    A receiver that is offered a version with its data has both first phases together.
    """

    ready_seconds: float = 30.0
    """From OFFER to READY: the requests in flight must end."""
    transfer_seconds: float = 60.0
    """From READY to APPLIED, at least; a large model gets bytes / 50 MB/s."""
    commit_seconds: float = 30.0
    """From COMMIT to ACK."""
    straggler_seconds: float = 1.0
    """How long enough receivers that applied wait for the slower ones before they serve."""

    def transfer(self, nbytes: int) -> float:
        """Return the bound of transferring `nbytes`."""
        return max(self.transfer_seconds, nbytes / SLOWEST_BYTES_PER_SECOND)

    def total(self, nbytes: int) -> float:
        """Return the bound of a whole sync, after which its publisher is taken for dead."""
        return self.ready_seconds + self.transfer(nbytes) + self.commit_seconds
