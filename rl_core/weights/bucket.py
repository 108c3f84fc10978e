"""Assignment of tensors to buckets.

A bucket holds consecutive whole tensors of the manifest; each tensor starts at a multiple of 512 bytes. `Layout` describes a
buffer that holds all buckets of a version one after the other. The publisher's host copy has this layout, and every transport
sends slices of that copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ALIGNMENT = 512
DEFAULT_BUCKET_BYTES = 128 * 1024 * 1024


def aligned(position: int) -> int:
    """Return `position` (bytes) rounded up to the next multiple of `ALIGNMENT`."""
    return -(-position // ALIGNMENT) * ALIGNMENT


class Entry(Protocol):
    """The properties of a tensor that `bucket_plan` needs. Implemented by `WeightEntry` and `SourceEntry`."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are sent."""
        ...

    @property
    def alias_of(self) -> str | None:
        """Return the name of the tensor whose bytes this tied name shares; None if its own bytes are sent."""
        ...


def bucket_plan(entries: Sequence[Entry], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[int]]:
    """Return the buckets as lists of indices into `entries`, in the order of `entries`. Aliases are in no bucket.

    A tensor that would make the bucket larger than `bucket_bytes` (padding included) starts a new one; a tensor that is larger
    than `bucket_bytes` has a bucket of its own. Raises ValueError if `bucket_bytes` <= 0 or if there is no tensor to send.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    plan: list[list[int]] = []
    end = 0
    for index, entry in enumerate(entries):
        if entry.alias_of is not None:
            continue
        if not plan or aligned(end) + entry.nbytes > bucket_bytes:
            plan.append([])
            end = 0
        plan[-1].append(index)
        end = aligned(end) + entry.nbytes
    if not plan:
        raise ValueError("a bucket plan needs at least one tensor, got none; pass the model's parameters")
    return plan


@dataclass(frozen=True, slots=True)
class Bucket:
    """Position and contents of one bucket in a buffer that holds all buckets."""

    start: int
    """Offset in the buffer, bytes; a multiple of 512."""
    nbytes: int
    """Bytes from the start of its first tensor to the end of its last one."""
    entries: tuple[int, ...]
    """Indices of its tensors in the manifest."""
    offsets: tuple[int, ...]
    """Offset of each tensor relative to the start of the bucket, bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of all tensors of a version in one buffer."""

    buckets: tuple[Bucket, ...]
    starts: dict[int, int]
    """Entry index -> offset in the buffer, bytes. Aliases are absent."""
    nbytes: int
    """Size of the buffer."""
    bucket_bytes: int
    """Bucket size that the layout was made with. Equal entries and an equal bucket size give an equal layout in every process."""

    @classmethod
    def of(cls, entries: Sequence[Entry], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> "Layout":
        """Return the layout of the buckets of `bucket_plan`. Raises the same errors."""
        buckets, starts, position = [], {}, 0
        for members in bucket_plan(entries, bucket_bytes):
            offsets, end = [], 0
            for index in members:
                offsets.append(aligned(end))
                starts[index] = position + offsets[-1]
                end = offsets[-1] + entries[index].nbytes
            buckets.append(Bucket(position, end, tuple(members), tuple(offsets)))
            position += aligned(end)
        return cls(tuple(buckets), starts, position, bucket_bytes)
