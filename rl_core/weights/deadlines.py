"""Time limits of one weight sync, from `runtime.deadlines` of the job and the size of the model."""

from dataclasses import dataclass, replace

from rl_core.api.errors import DeadlineExceeded
from rl_core.api.job import RLJobSpec

SLOWEST_BYTES_PER_SECOND = 50e6
READY_SHARE, COMMIT_SHARE, TRANSFER_SHARE = 0.1, 0.1, 0.2
"""Fractions of `sync_seconds` for OFFER to READY, for COMMIT to ACK, and at least for the bytes. A large model may use the rest for its bytes."""
PULL_SHARE = 0.8
"""Fraction of `sync_seconds` that a late joiner waits for a version that is being published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Time limits, in seconds, for each phase of a sync. A receiver that exceeds one takes no further part in the sync.

    `sync_seconds` limits all phases together. A receiver that is offered a version with its data has the time of the first two phases.
    """

    sync_seconds: float = 300.0
    """The whole sync: gathering, offer, bytes and commit (`runtime.deadlines.weightSync`)."""
    silence_seconds: float = 15.0
    """Silence on a stream after which the other end is considered lost (`runtime.deadlines.lost`)."""
    collective_seconds: float = 60.0
    """Forming a process group, and each broadcast in it (`runtime.deadlines.collective`)."""
    straggler_seconds: float = 1.0
    """Minimum time that receivers which have applied the version wait for slower ones before it is committed."""

    @classmethod
    def from_spec(cls, spec: RLJobSpec) -> "Deadlines":
        """Return the limits of a job."""
        settings = spec.runtime.deadlines
        return cls(
            sync_seconds=settings.weight_sync, silence_seconds=settings.lost, collective_seconds=settings.collective
        )

    @property
    def ready_seconds(self) -> float:
        """Return the limit from OFFER to READY, in which requests in flight must end."""
        return self.sync_seconds * READY_SHARE

    @property
    def commit_seconds(self) -> float:
        """Return the limit from COMMIT to ACK."""
        return self.sync_seconds * COMMIT_SHARE

    @property
    def pull_seconds(self) -> float:
        """Return how long a late joiner waits at the publisher for the commit of a version that is being published."""
        return self.sync_seconds * PULL_SHARE

    def transfer(self, nbytes: int) -> float:
        """Return the limit from READY to APPLIED for `nbytes`, in seconds.

        It is the time that the slowest supported link needs, but at least `TRANSFER_SHARE` of the sync and at most what the other phases
        leave.
        """
        remaining = self.sync_seconds - self.ready_seconds - self.commit_seconds
        return min(max(self.sync_seconds * TRANSFER_SHARE, nbytes / SLOWEST_BYTES_PER_SECOND), remaining)

    def straggler(self, nbytes: int) -> float:
        """Return how long receivers that have applied the version wait for slower ones.

        This is a tenth of the time that the slowest supported link needs for `nbytes`, within bounds.
        """
        return max(self.straggler_seconds, min(0.1 * nbytes / SLOWEST_BYTES_PER_SECOND, 0.1 * self.sync_seconds))

    def total(self, nbytes: int) -> float:
        """Return the limit from OFFER to ACK, after which a receiver considers its publisher dead."""
        return self.ready_seconds + self.transfer(nbytes) + self.commit_seconds

    def after(self, seconds: float) -> "Deadlines":
        """Return the limits of a sync that has spent `seconds` on gathering the weights. Raises DeadlineExceeded if no time is left."""
        if seconds >= self.sync_seconds:
            raise DeadlineExceeded(
                f"gathering the weights must leave time to send them, got {seconds:.1f} s of the {self.sync_seconds:g} s of a sync; "
                "raise runtime.deadlines.weightSync"
            )
        return replace(self, sync_seconds=self.sync_seconds - seconds)
