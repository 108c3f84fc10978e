"""The weights of a model cut by megatron as a `VersionSource`: each rank sends rank 0 its boxes of a bucket's tensors.

Which rank sends which box follows from the cut alone and is agreed on once; a bucket is one message per rank that has a part in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice
from rl_core.actors.source import GatheredSource
from rl_core.weights.bucket import Bucket
from rl_core.weights.version_source import SourceEntry

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) of a part of a tensor."""


class SentParts:
    """Who sends which boxes, by rank and name; equal on all ranks."""

    def __init__(self, sent: Mapping[str, LocalSlice], ranks: Ranks) -> None:
        """`sent`: what this rank sends; collective."""
        own = {name: [list(part.offset), list(part.tensor.shape)] for name, part in sent.items()}
        self.boxes: list[dict[str, Box]] = [
            {name: (tuple(offset), tuple(size)) for name, (offset, size) in boxes.items()}
            for boxes in ranks.gather(own)
        ]


class MegatronSource(GatheredSource):
    """What megatron's ranks hold of a model."""

    def __init__(
        self,
        entries: Sequence[SourceEntry],
        sent: Mapping[str, LocalSlice],
        parts: SentParts,
        ranks: Ranks,
        *,
        bucket_bytes: int,
    ) -> None:
        """`sent`: what this rank sends of the tensors, by name, as told to `parts`."""
        self._sent, self._parts, self._ranks = sent, parts, ranks
        super().__init__(entries, bucket_bytes=bucket_bytes)

    def _start(self, place: Bucket) -> "_Sent":
        members = [self.entries[index] for index in place.entries]
        return _Sent(members, self._sent, self._parts, self._ranks)


class _Sent:
    """One bucket on its way to rank 0. All ranks make it in the same order."""

    def __init__(
        self, members: Sequence[SourceEntry], sent: Mapping[str, LocalSlice], parts: SentParts, ranks: Ranks
    ) -> None:
        self._members, self._parts, self._ranks = members, parts, ranks
        self._own, self._work, self._arriving = sent, [], {}
        if ranks.rank == 0:
            self._receive()
        else:
            self._send()

    _work: list[Any]
    _arriving: dict[int, dict[torch.dtype, Tensor]]
    """Rank -> type on the wire -> its elements, end to end; on rank 0."""

    def _receive(self) -> None:
        for rank, boxes in enumerate(self._parts.boxes):
            if rank == 0:
                continue
            for dtype in self._dtypes(boxes):
                size = sum(prod(boxes[one.name][1]) for one in self._of(boxes, dtype))
                buffer = torch.empty(size, dtype=dtype, device=self._ranks.device)
                self._arriving.setdefault(rank, {})[dtype] = buffer
                self._work.append(dist.irecv(buffer, rank))

    def _send(self) -> None:
        boxes = self._parts.boxes[self._ranks.rank]
        for dtype in self._dtypes(boxes):
            members = [self._own[one.name].tensor.reshape(-1).to(dtype) for one in self._of(boxes, dtype)]
            self._arriving.setdefault(self._ranks.rank, {})[dtype] = buffer = torch.cat(
                members
            )  # lives until it is sent
            self._work.append(dist.isend(buffer, 0))

    def _dtypes(self, boxes: Mapping[str, Box]) -> list[torch.dtype]:
        return sorted({getattr(torch, one.dtype) for one in self._members if one.name in boxes}, key=str)

    def _of(self, boxes: Mapping[str, Box], dtype: torch.dtype) -> list[SourceEntry]:
        return [one for one in self._members if one.name in boxes and getattr(torch, one.dtype) == dtype]

    def wait(self) -> None:
        """Wait until what this rank sends or receives is through."""
        for work in self._work:
            work.wait()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the whole tensors in their types on the wire; on rank 0."""
        used: dict[tuple[int, torch.dtype], int] = {}
        for one in self._members:
            dtype = getattr(torch, one.dtype)
            whole = torch.empty(one.shape, dtype=dtype, device=self._ranks.device)
            for rank, boxes in enumerate(self._parts.boxes):
                if one.name not in boxes:
                    continue
                offset, size = boxes[one.name]
                target = whole[tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))]
                if rank == 0:
                    target.copy_(self._own[one.name].tensor)
                    continue
                start = used.get((rank, dtype), 0)
                used[rank, dtype] = start + prod(size)
                target.copy_(self._arriving[rank][dtype][start : start + prod(size)].view(size))
            yield whole
