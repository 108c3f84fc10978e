"""A `VersionSource` for a model that is sharded over ranks: rank 0 gathers whole tensors, one bucket after the other.

Each rank offers the boxes that it stores, and a plan says which of them are sent to rank 0. A bucket takes one message from each rank that
contributes to it. The next bucket is transferred while the consumer works on one, so two buckets are in memory.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.actors.slices import LocalSlice, Slices
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.reshard import Held, TensorSlice, Transfer, execute, plan_reshard
from rl_core.weights.storage_alias import storage_alias
from rl_core.weights.version_source import SourceBucket, SourceEntry

if TYPE_CHECKING:
    from rl_core.actors.device_copies import DeviceCopies


class GatheringPlan:
    """Says which rank sends which boxes of each tensor to rank 0. It is made once and is equal on all ranks."""

    def __init__(self, slices: Slices, ranks: Ranks) -> None:
        """Make the plan from `slices`, what this rank stores by name.

        Collective. Raises ValueError when no rank stores some part of a tensor.
        """
        local_boxes = {
            name: [list(parts[0].shape), [box.ranges for part in parts for box in part.boxes()]]
            for name, parts in slices.items()
        }
        boxes_of_ranks = ranks.gather(local_boxes)
        stored_slices = [
            TensorSlice(rank, name, tuple(shape), tuple((start, stop) for start, stop in ranges))
            for rank, stored in enumerate(boxes_of_ranks)
            for name, (shape, boxes) in stored.items()
            for ranges in boxes
        ]
        shapes = {name: tuple(shape) for stored in boxes_of_ranks for name, (shape, _) in stored.items()}
        whole_tensors = [
            TensorSlice(0, name, shape, tuple((0, size) for size in shape)) for name, shape in shapes.items()
        ]
        self.transfers: dict[str, list[Transfer]] = {name: [] for name in shapes}
        """By tensor name: which slices rank 0 receives, and from which ranks, so that it has the whole tensor."""
        # Every rank counts as a node of its own, so that rank 0 keeps the elements that it stores instead of receiving them.
        for transfer in plan_reshard(stored_slices, whole_tensors, nodes=range(ranks.size)):
            self.transfers[transfer.name].append(transfer)

    def is_complete_on_rank0(self, name: str) -> bool:
        """Return whether rank 0 stores the whole tensor `name` in one box, so that nothing is gathered."""
        return [transfer.source for transfer in self.transfers[name]] == [0]


class GatheredSource:
    """The weights of one version. Every rank creates one and calls `finish` at the end; on rank 0 the publisher takes the buckets first."""

    def __init__(
        self,
        entries: Sequence[SourceEntry],
        slices: Slices,
        plan: GatheringPlan,
        ranks: Ranks,
        *,
        bucket_bytes: int,
    ) -> None:
        """Start gathering `entries`. `slices` is what this rank stores by name, sharded as for `plan`."""
        self.entries = tuple(entries)
        self.layout = Layout.of(self.entries, bucket_bytes)
        self._slices, self._plan, self._ranks = slices, plan, ranks
        self._gathering = self._gather()
        self.copies: DeviceCopies | None = None
        """Copies of the version on the devices of other ranks. Set before the first bucket is taken, on all ranks or none."""

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets on `device`, on rank 0. Collective. Buckets that are not taken are gathered by `finish`."""
        for place, gathered in self._gathering:
            yield SourceBucket(place, tuple(tensor.to(device) for tensor in gathered.tensors))

    def finish(self) -> None:
        """Gather the remaining buckets and discard them. The other ranks wait until this rank has taken part.

        If there are copies on other devices, all ranks wait until rank 0 calls this; then the copies are freed.
        """
        try:
            for _ in self._gathering:
                pass
            if self.copies is not None:
                self.copies.await_end()
        finally:
            if self.copies is not None:
                self.copies.free()

    def _gather(self) -> "Iterator[tuple[Bucket, _Gathered]]":
        """Yield every bucket once it has arrived, while the next one is being transferred."""
        pending: tuple[Bucket, _Gathered] | None = None
        for place in self.layout.buckets:
            members = [self.entries[index] for index in place.entries]
            started = place, _Gathered(members, self._slices, self._plan, self._ranks)
            if pending is not None:
                yield self._complete_bucket(*pending)
            pending = started
        if pending is not None:
            yield self._complete_bucket(*pending)
        if self.copies is not None:
            self.copies.collect_handles()

    def _complete_bucket(self, place: Bucket, gathered: "_Gathered") -> "tuple[Bucket, _Gathered]":
        """Wait until rank 0 has the whole bucket, broadcast it to the ranks that keep a copy of the weights, if any, and return it."""
        gathered.wait()
        if self.copies is not None:
            self.copies.broadcast(place, gathered.tensors if self._ranks.rank == 0 else ())
        return place, gathered


class _Gathered:
    """The transfer of one bucket to rank 0. All ranks start the transfers in the same order."""

    def __init__(self, members: Sequence[SourceEntry], slices: Slices, plan: GatheringPlan, ranks: Ranks) -> None:
        self._slices = slices
        self._dtypes = {entry.name: getattr(torch, entry.dtype) for entry in members}
        sharded = [entry for entry in members if not plan.is_complete_on_rank0(entry.name)]
        self._assembled: dict[str, Tensor] = {}
        """Memory for the tensors that are assembled from several boxes, by name; on rank 0 only."""
        if ranks.rank == 0:
            self._assembled = {
                entry.name: torch.empty(entry.shape, dtype=self._dtypes[entry.name], device=ranks.device)
                for entry in sharded
            }
        self._exchange = execute(
            [transfer for entry in sharded for transfer in plan.transfers[entry.name]],
            rank=ranks.rank,
            held={entry.name: _held(slices[entry.name]) for entry in sharded if entry.name in slices},
            room={name: Held(tuple((0, n) for n in tensor.shape), tensor) for name, tensor in self._assembled.items()},
            dtypes=self._dtypes,
            device=ranks.device,
        )

    def wait(self) -> None:
        """Wait until this rank's transfers are complete."""
        self._exchange.wait()

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Whole tensors in their types on the wire; on rank 0, once the bucket arrived."""
        return tuple(self._tensor(name, dtype) for name, dtype in self._dtypes.items())

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if (tensor := self._assembled.get(name)) is None:
            (stored,) = self._slices[name]
            tensor = storage_alias(stored.tensor.reshape(stored.shape).to(dtype))
        return tensor


def _held(parts: Sequence[LocalSlice]) -> list[Held]:
    return [Held(box.ranges, box.tensor) for part in parts for box in part.boxes()]
