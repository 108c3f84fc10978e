"""The weights of a model under FSDP2 as a `VersionSource`: one collective per bucket.

Every rank puts its rows of a bucket's tensors into one flat buffer, already in the type of the wire; rank 0 gathers the buffers and
puts the rows together. FSDP2 cuts dimension 0 into equal runs of rows, the last ranks may have fewer or none, so all buffers
have the size of the first rank's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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
"""Bytes at which each tensor's rows start in a buffer: any element type can be viewed there."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the rows of one sharded tensor lie in every rank's buffer."""

    start: int
    rows: int
    """Rows of the first rank; other ranks have as many or fewer."""
    width: int
    """Elements of a row."""
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """Return the end, bytes."""
        return self.start + self.rows * self.width * int(self.dtype.itemsize)


class FSDPSource(GatheredSource):
    """What FSDP2 holds of a model."""

    def __init__(
        self,
        slices: Mapping[str, LocalSlice],
        names: Sequence[tuple[str, str | None]],
        ranks: Ranks,
        *,
        dtype: str,
        bucket_bytes: int,
    ) -> None:
        """`slices`: what this rank stores, by name. `names`: (name, the name it is tied to or None) in wire order.

        `dtype`: type of floating tensors on the wire.
        """
        self._slices, self._ranks = slices, ranks
        entries = [
            SourceEntry(name, slices[tied or name].shape, wire_dtype(slices[tied or name].tensor, dtype), tied)
            for name, tied in names
        ]
        super().__init__(entries, bucket_bytes=bucket_bytes)

    def _start(self, place: Bucket) -> "_Gathered":
        return _Gathered([self._member(index) for index in place.entries], self._ranks)

    def _member(self, index: int) -> "_Member":
        entry = self.entries[index]
        return self._slices[entry.name], getattr(torch, entry.dtype)


_Member = tuple[LocalSlice, torch.dtype]


class _Gathered:
    """One bucket on its way to rank 0. All ranks make it in the same order."""

    def __init__(self, members: Sequence[_Member], ranks: Ranks) -> None:
        self._members = members
        self._slots: dict[int, Slot] = {}
        """Of the members that are cut, by place in the bucket."""
        self._work: Any = None
        self._parts: Tensor | None = None
        """uint8 [ranks, buffer] on rank 0."""
        cut = [at for at, (held, _) in enumerate(members) if ranks.size > 1 and not held.replicated]
        if cut:
            self._start(cut, ranks)

    def _start(self, cut: Sequence[int], ranks: Ranks) -> None:
        end = 0
        for at in cut:
            (height, *rest), dtype = self._members[at][0].shape, self._members[at][1]
            self._slots[at] = slot = Slot(end, -(-height // ranks.size), prod(rest), dtype)
            end = -(-slot.stop // ALIGNMENT) * ALIGNMENT
        end = max(end, ALIGNMENT)  # nothing but empty tensors: a buffer without bytes has no strides to view
        self._own = torch.empty(end, dtype=torch.uint8, device=ranks.device)
        for at, slot in self._slots.items():
            rows = self._members[at][0].tensor
            _rows(self._own, slot)[: rows.shape[0]].copy_(rows.reshape(rows.shape[0], slot.width))
        parts = None
        if ranks.rank == 0:
            self._parts = torch.empty(ranks.size, end, dtype=torch.uint8, device=ranks.device)
            parts = list(self._parts)
        self._work = dist.gather(self._own, parts, dst=0, async_op=True)

    def wait(self) -> None:
        """Wait until this rank's part in the gathering is done."""
        if self._work is not None:
            self._work.wait()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the whole tensors in their types on the wire; on rank 0."""
        for at, (held, dtype) in enumerate(self._members):
            if at not in self._slots:
                yield host_alias(held.tensor.to(dtype))
            elif self._parts is not None:
                # Only the last ranks have fewer rows: what they lack is at the end.
                rows = _rows(self._parts, self._slots[at]).flatten(0, 1)[: held.shape[0]]
                yield rows.reshape(held.shape)


def _rows(buffer: Tensor, slot: Slot) -> Tensor:
    """Return the rows of `slot` in `buffer` (uint8 [..., bytes]) as [..., rows, width], sharing memory."""
    return buffer[..., slot.start : slot.stop].view(slot.dtype).view(*buffer.shape[:-1], slot.rows, slot.width)
