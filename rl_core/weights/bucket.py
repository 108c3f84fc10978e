"""Full weights in buckets: which tensors travel together, and the frames of a stream.

A bucket is a run of whole tensors in wire order, each starting at a multiple of 512 bytes. A stream is the manifest frame,
then per bucket a header frame and one raw buffer. `Layout` is the same cut for memory that holds all buckets one after the
other: the publisher's host copy has it, and every transport sends slices of that copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgpack
import numpy as np

from rl_core.api.errors import DataError
from rl_core.transports.dtypes import CODES, tensor_view
from rl_core.weights import words
from rl_core.weights.manifest import WeightEntry, WeightManifest, checked_int, checked_text, host_bytes

if TYPE_CHECKING:
    import torch

ALIGNMENT = 512
DEFAULT_BUCKET_BYTES = 128 * 1024 * 1024
Frame = bytes | bytearray | memoryview


def aligned(position: int) -> int:
    """Return `position` rounded up to the alignment of tensors."""
    return -(-position // ALIGNMENT) * ALIGNMENT


class Entry(Protocol):
    """What a plan needs to know of a name: an entry of a manifest or of a source."""

    @property
    def nbytes(self) -> int:
        """Return the size on the wire."""
        ...

    @property
    def alias_of(self) -> str | None:
        """Return the entry that travels for it; None = itself."""
        ...


def bucket_plan(entries: Sequence[Entry], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[int]]:
    """Return the buckets as lists of indices into `entries`, in wire order; aliases travel with nobody.

    A bucket closes before the next tensor would exceed `bucket_bytes`, alignment included; a larger tensor travels alone.
    Raises ValueError for `bucket_bytes` <= 0 or when nothing travels.
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
    """A bucket inside the host copy."""

    start: int
    """Where it starts, bytes; a multiple of 512."""
    nbytes: int
    """Its size, up to the end of its last tensor."""
    entries: tuple[int, ...]
    """Indices of its tensors."""
    offsets: tuple[int, ...]
    """Where each starts inside the bucket."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets of a manifest, one after the other."""

    buckets: tuple[Bucket, ...]
    starts: dict[int, int]
    """Entry index -> position in the whole; aliases are absent."""
    nbytes: int
    """Size of the whole."""
    bucket_bytes: int
    """What it was cut by: the same entries and the same number give the same layout everywhere."""

    @classmethod
    def of(cls, entries: Sequence[Entry], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> "Layout":
        """Return the layout of `bucket_plan`. Raises as it does."""
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


def encode(
    manifest: WeightManifest,
    tensors: Mapping[str, "torch.Tensor"] | Iterable[tuple[str, "torch.Tensor"]],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Iterator[Frame]:
    """Yield the frames of `tensors`, which come in the manifest's order: floating ones are cast to their wire type.

    Raises ValueError when a name is missing, unknown, out of order or of another shape.
    """
    layout = Layout.of(manifest.entries, bucket_bytes)
    source = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    yield manifest.packed
    for index, bucket in enumerate(layout.buckets):
        buffer = np.zeros(bucket.nbytes, np.uint8)
        for member, offset in zip(bucket.entries, bucket.offsets, strict=True):
            entry = manifest.entries[member]
            buffer[offset : offset + entry.nbytes] = host_bytes(_next_tensor(source, entry, manifest))
        yield bucket_header(manifest, layout, index)
        yield buffer.data
    for name, _ in source:
        _check_alias(name, manifest)


def _next_tensor(source: Iterator[tuple[str, Any]], entry: WeightEntry, manifest: WeightManifest) -> "torch.Tensor":
    import torch

    for name, tensor in source:
        if name == entry.name:
            if tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{name!r} must have shape {list(entry.shape)}, got {list(tensor.shape)}")
            sent: torch.Tensor = tensor.detach().to("cpu", getattr(torch, entry.dtype))
            return sent
        _check_alias(name, manifest, expected=entry.name)
    raise ValueError(f"tensors must hold {entry.name!r}, which the manifest lists; got to their end without it")


def _check_alias(name: str, manifest: WeightManifest, expected: str = "no more tensors") -> None:
    if all(entry.name != name or entry.alias_of is None for entry in manifest.entries):
        raise ValueError(f"tensors must come in the manifest's order: expected {expected!r}, got {name!r}")


def bucket_header(manifest: WeightManifest, layout: Layout, index: int) -> bytes:
    """Return the header frame of bucket `index`: [version, epoch, index, count, nbytes, [[name, offset], ...]]."""
    bucket = layout.buckets[index]
    rows = [
        [manifest.entries[member].name, offset] for member, offset in zip(bucket.entries, bucket.offsets, strict=True)
    ]
    header = [manifest.version, manifest.epoch, index, len(layout.buckets), bucket.nbytes, rows]
    packed: bytes = msgpack.packb(header)
    return packed


def decode(frames: Iterable[Frame], *, verify: bool = True) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield (name, tensor) of a stream of `encode`; tensors view the frames, aliases follow what they name.

    Raises DataError for a gap, a size, a name or an order that is not the manifest's, and (`verify`) for a tensor whose
    checksum differs, by name.
    """
    source = iter(frames)
    manifest = WeightManifest.unpack(bytes(_next_frame(source, "the manifest")))
    pending = {index: entry for index, entry in enumerate(manifest.entries) if entry.alias_of is None}
    aliases: dict[str, list[str]] = {}
    for entry in manifest.entries:
        if entry.alias_of is not None:
            aliases.setdefault(entry.alias_of, []).append(entry.name)
    number, count = 0, 1
    while number < count:
        header = _Header.unpack(_next_frame(source, f"header of bucket {number}"), manifest, number)
        if number and header.count != count:
            raise DataError(f"every bucket must say that there are {count}, bucket {number} says {header.count}")
        count = header.count
        raw = memoryview(_next_frame(source, f"bucket {number}"))
        for entry, offset in _members(header, raw.nbytes, pending):
            tensor = _tensor(entry, raw[offset : offset + entry.nbytes], verify=verify)
            for name in (entry.name, *aliases.get(entry.name, ())):
                yield name, tensor
        number += 1
    if pending:
        missing = [entry.name for entry in pending.values()]
        raise DataError(f"weight stream ended without {len(missing)} tensors, first {missing[0]!r}")


def _next_frame(source: Iterator[Frame], what: str) -> Frame:
    frame = next(source, None)
    if frame is None:
        raise DataError(f"weight stream ended before {what}")
    return frame


@dataclass(frozen=True, slots=True)
class _Header:
    """A bucket's header frame, its structure checked."""

    index: int
    count: int
    """Buckets of the stream."""
    nbytes: int
    rows: list[tuple[str, int]]
    """(name, offset in the bucket)."""

    @classmethod
    def unpack(cls, frame: Frame, manifest: WeightManifest, number: int) -> "_Header":
        """Return the header of bucket `number`. Raises DataError for another one, and for what is not a header."""
        try:
            *numbers, rows = msgpack.unpackb(frame)
            version, epoch, index, count, nbytes = map(checked_int, numbers)
            rows = [(checked_text(name), checked_int(offset)) for name, offset in rows]
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DataError(f"header of bucket {number} is malformed: {error}") from error
        if (version, epoch) != (manifest.version, manifest.epoch):
            raise DataError(
                f"bucket {number} must be of version {manifest.version} epoch {manifest.epoch}, got {version} epoch {epoch}"
            )
        if index != number or count <= index:
            raise DataError(f"buckets must come without gaps: expected index {number}, got {index} of {count}")
        return cls(index, count, nbytes, rows)


def _members(header: _Header, nbytes: int, pending: dict[int, WeightEntry]) -> list[tuple[WeightEntry, int]]:
    """Return the bucket's entries with their offsets and take them out of `pending`."""
    if nbytes != header.nbytes:
        raise DataError(f"bucket {header.index} must have {header.nbytes} bytes, got {nbytes}")
    members = []
    order = iter(list(pending.items()))
    end = 0
    for name, offset in header.rows:
        index, entry = next(order, (-1, None))
        if entry is None or entry.name != name:
            expected = repr(entry.name) if entry is not None else "nothing more"
            raise DataError(f"bucket {header.index} must hold {expected} next, got {name!r}")
        if offset != aligned(end) or offset + entry.nbytes > nbytes:
            raise DataError(
                f"{name!r} must lie inside the {nbytes} bytes of bucket {header.index} at offset {aligned(end)}, got {offset}"
            )
        end = offset + entry.nbytes
        del pending[index]
        members.append((entry, offset))
    return members


def _tensor(entry: WeightEntry, raw: memoryview, *, verify: bool) -> "torch.Tensor":
    if verify:
        sums = words.sum_bytes(np.frombuffer(raw, np.uint8))
        if sums != entry.checksum:
            raise DataError(f"{entry.name!r} must have checksum {entry.checksum}, got {sums}; its bytes were damaged")
    return tensor_view(raw, CODES[entry.dtype], entry.shape, copy=False)
