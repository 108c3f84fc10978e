"""The weights of a model that several ranks store, as a `VersionSource`: whole tensors on rank 0 only, bucket by bucket.

The next bucket is on its way while the consumer works on one: two are in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.version_source import SourceBucket, SourceEntry


class Arriving(Protocol):
    """One bucket on its way to rank 0."""

    def wait(self) -> None:
        """Wait until this rank's part in it is done."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the whole tensors in their types on the wire; on rank 0, once it arrived."""


class GatheredSource(ABC):
    """One version; every rank makes one and calls `finish` in the end, rank 0 lets the publisher take the buckets first."""

    def __init__(self, entries: Sequence[SourceEntry], *, bucket_bytes: int) -> None:
        self.entries = tuple(entries)
        self.layout = Layout.of(self.entries, bucket_bytes)
        self._gathering = self._gather()

    @abstractmethod
    def _start(self, place: Bucket) -> Arriving:
        """Set a bucket off; all ranks do it in the same order."""

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets on `device`, on rank 0; collective. What is not taken here is gathered by `finish`."""
        for place, gathered in self._gathering:
            yield SourceBucket(place, tuple(tensor.to(device) for tensor in gathered.tensors()))

    def finish(self) -> None:
        """Take part in what is left of the gathering: the other ranks wait for this one."""
        for _ in self._gathering:
            pass

    def _gather(self) -> Iterator[tuple[Bucket, Arriving]]:
        """Yield every bucket, arrived; the next one is on its way."""
        under_way: tuple[Bucket, Arriving] | None = None
        for place in self.layout.buckets:
            started = place, self._start(place)
            if under_way is not None:
                under_way[1].wait()
                yield under_way
            under_way = started
        if under_way is not None:
            under_way[1].wait()
            yield under_way
