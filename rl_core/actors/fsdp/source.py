"""The weights of a model under FSDP as a `VersionSource`: one collective per bucket.

Every rank of the first copy puts its elements of a bucket's tensors into one flat buffer, already in the type of the wire; rank 0 gathers
the buffers and puts the elements together. FSDP2 cuts dimension 0 into runs of rows, FSDP1 a layer into runs of elements: both ways the
elements of the ranks follow each other, and some have fewer or none. A buffer has room for the rank that has most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice
from rl_core.actors.source import GatheredSource
from rl_core.weights.bucket import Bucket
from rl_core.weights.host_alias import host_alias
from rl_core.weights.manifest import wire_dtype
from rl_core.weights.version_source import SourceEntry

ALIGNMENT = 16
"""Bytes at which each tensor's elements start in a buffer: any element type can be viewed there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Givers:
    """The first ranks, who together have every tensor once."""

    counts: Mapping[str, Sequence[int]]
    """Elements that each of them has of the tensors that are cut, by name."""
    group: Any
    """Their process group; None = all ranks."""
    size: int

    @classmethod
    def of(
        cls, slices: Mapping[str, LocalSlice], ranks: Ranks, *, copy_size: int | None = None, group: Any = None
    ) -> "Givers":
        """Return the givers of `slices`, which every rank has of the same names; collective. `copy_size`: how many they are, None = all."""
        size = ranks.size if copy_size is None else copy_size
        if ranks.size == 1:
            return cls(counts={}, group=None, size=1)
        own = {name: part.tensor.numel() for name, part in slices.items() if not part.replicated}
        counts = ranks.gather(own)[:size]
        return cls(counts={name: [one[name] for one in counts] for name in own}, group=group, size=size)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the elements of one cut tensor lie in every rank's buffer."""

    start: int
    counts: Sequence[int]
    """Elements, by rank."""
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """Return the end, bytes."""
        return self.start + max(self.counts) * int(self.dtype.itemsize)


class FSDPSource(GatheredSource):
    """What FSDP holds of a model."""

    def __init__(
        self,
        slices: Mapping[str, LocalSlice],
        names: Sequence[tuple[str, str | None]],
        ranks: Ranks,
        givers: Givers,
        *,
        dtype: str,
        bucket_bytes: int,
    ) -> None:
        """`slices`: what this rank stores, by name. `names`: (name, the name it is tied to or None) in wire order.

        `dtype`: type of floating tensors on the wire.
        """
        self._slices, self._ranks, self._givers = slices, ranks, givers
        entries = [
            SourceEntry(name, slices[tied or name].shape, wire_dtype(slices[tied or name].tensor, dtype), tied)
            for name, tied in names
        ]
        super().__init__(entries, bucket_bytes=bucket_bytes)

    def _start(self, place: Bucket) -> "_Gathered":
        return _Gathered([self._member(index) for index in place.entries], self._ranks, self._givers)

    def _member(self, index: int) -> "_Member":
        entry = self.entries[index]
        return _Member(self._slices[entry.name], getattr(torch, entry.dtype), self._givers.counts.get(entry.name))


class _Member(NamedTuple):
    """A tensor of a bucket."""

    held: LocalSlice
    dtype: torch.dtype
    """On the wire."""
    counts: Sequence[int] | None
    """Elements by rank; None where every rank has all."""


class _Gathered:
    """One bucket on its way to rank 0. All ranks make it in the same order."""

    def __init__(self, members: Sequence[_Member], ranks: Ranks, givers: Givers) -> None:
        self._members = members
        self._slots: dict[int, Slot] = {}
        """Of the members that are cut, by place in the bucket."""
        self._work: Any = None
        self._parts: Tensor | None = None
        """uint8 [givers, buffer] on rank 0."""
        end = 0
        for at, (_, dtype, counts) in enumerate(members):
            if counts is not None:
                self._slots[at] = slot = Slot(end, counts, dtype)
                end = -(-slot.stop // ALIGNMENT) * ALIGNMENT
        if self._slots and ranks.rank < givers.size:
            # Nothing but empty tensors: a buffer without bytes has no strides to view.
            self._start(max(end, ALIGNMENT), ranks, givers)

    def _start(self, size: int, ranks: Ranks, givers: Givers) -> None:
        self._own = torch.empty(size, dtype=torch.uint8, device=ranks.device)
        for at, slot in self._slots.items():
            elements = self._members[at].held.tensor.reshape(-1)
            _elements(self._own, slot)[: elements.numel()].copy_(elements)
        parts = None
        if ranks.rank == 0:
            self._parts = torch.empty(givers.size, size, dtype=torch.uint8, device=ranks.device)
            parts = list(self._parts)
        self._work = dist.gather(self._own, parts, dst=0, group=givers.group, async_op=True)

    def wait(self) -> None:
        """Wait until this rank's part in the gathering is done."""
        if self._work is not None:
            self._work.wait()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the whole tensors in their types on the wire; on rank 0."""
        for at, (held, dtype, _) in enumerate(self._members):
            if at not in self._slots:
                yield host_alias(held.tensor.to(dtype))
            elif self._parts is not None:
                slot = self._slots[at]
                elements = _elements(self._parts, slot)
                given = [rank[:count] for rank, count in zip(elements, slot.counts, strict=True)]
                yield torch.cat(given).view(held.shape)


def _elements(buffer: Tensor, slot: Slot) -> Tensor:
    """Return the elements of `slot` in `buffer` (uint8 [..., bytes]) as [..., elements], sharing memory."""
    return buffer[..., slot.start : slot.stop].view(slot.dtype)
