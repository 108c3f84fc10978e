"""The bounds of one weight sync (trainers.md 9), from `runtime.deadlines` of the job and the size of the model."""

from dataclasses import dataclass, replace

from rl_core.api.errors import DeadlineExceeded
from rl_core.api.job import RLJobSpec

SLOWEST_BYTES_PER_SECOND = 50e6
READY_SHARE, COMMIT_SHARE, TRANSFER_SHARE = 0.1, 0.1, 0.2
"""Of the whole: for OFFER to READY, for COMMIT to ACK, and the least for the bytes. What is left belongs to a large model's bytes."""
PULL_SHARE = 0.8
"""Of the whole: how long a late joiner is kept waiting for a version that is being published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds a receiver has for each phase; one that misses a phase is out of this sync. `sync_seconds` bounds them together.

    A receiver that is offered a version with its data has both first phases together.
    """

    sync_seconds: float = 300.0
    """The whole, `runtime.deadlines.weightSync`: gathering, offer, bytes and commit."""
    silence_seconds: float = 15.0
    """Silence on a stream after which its other end is gone, `runtime.deadlines.lost`."""
    collective_seconds: float = 60.0
    """One formation of a process group and one broadcast in it, `runtime.deadlines.collective`."""
    straggler_seconds: float = 1.0
    """How long enough receivers that applied wait for the slower ones before they serve, at least."""

    @classmethod
    def from_spec(cls, spec: RLJobSpec) -> "Deadlines":
        """Return the bounds of a job."""
        own = spec.runtime.deadlines
        return cls(sync_seconds=own.weight_sync, silence_seconds=own.lost, collective_seconds=own.collective)

    @property
    def ready_seconds(self) -> float:
        """Return the bound from OFFER to READY: the requests in flight must end."""
        return self.sync_seconds * READY_SHARE

    @property
    def commit_seconds(self) -> float:
        """Return the bound from COMMIT to ACK."""
        return self.sync_seconds * COMMIT_SHARE

    @property
    def pull_seconds(self) -> float:
        """Return how long a late joiner waits at the publisher for the commit of the version that is under way."""
        return self.sync_seconds * PULL_SHARE

    def transfer(self, nbytes: int) -> float:
        """Return the bound from READY to APPLIED of `nbytes`: by the slowest link, between its least share and all that is left."""
        left = self.sync_seconds - self.ready_seconds - self.commit_seconds
        return min(max(self.sync_seconds * TRANSFER_SHARE, nbytes / SLOWEST_BYTES_PER_SECOND), left)

    def straggler(self, nbytes: int) -> float:
        """Return the grace of slower receivers: a tenth of what the slowest link may take for `nbytes`."""
        return max(self.straggler_seconds, min(0.1 * nbytes / SLOWEST_BYTES_PER_SECOND, 0.1 * self.sync_seconds))

    def total(self, nbytes: int) -> float:
        """Return the bound from OFFER to ACK, after which a receiver takes its publisher for dead."""
        return self.ready_seconds + self.transfer(nbytes) + self.commit_seconds

    def after(self, seconds: float) -> "Deadlines":
        """Return the bounds of a sync of which `seconds` are spent on gathering the weights. Raises DeadlineExceeded when that is all."""
        if seconds >= self.sync_seconds:
            raise DeadlineExceeded(
                f"gathering the weights must leave time to send them, got {seconds:.1f} s of the {self.sync_seconds:g} s of a sync; "
                "raise runtime.deadlines.weightSync"
            )
        return replace(self, sync_seconds=self.sync_seconds - seconds)
