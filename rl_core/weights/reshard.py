"""Plans which part of a tensor goes from which rank to which, and sends the parts.

Source and destination ranks describe what they hold by intervals of the Hugging Face tensors. The plan is computed from these
descriptions alone, for any kind of sharding (tensor, pipeline or data parallel, even or uneven), so every rank computes the same plan
without communication. Only `execute` needs torch.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open interval [start, stop) per dimension of the Hugging Face tensor."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a tensor that `rank` holds or is to hold."""

    rank: int
    name: str
    """Name of the parameter in the Hugging Face model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a tensor that is sent from rank `source` to rank `destination`."""

    source: int
    destination: int
    name: str
    ranges: Ranges

    @property
    def size(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        return _size(self.ranges)


def plan_reshard(
    sources: Iterable[TensorSlice],
    destinations: Iterable[TensorSlice],
    *,
    nodes: Mapping[int, Any] | Sequence[Any] | None = None,
) -> tuple[Transfer, ...]:
    """Return transfers that give every element of the destinations from exactly one source, sorted by tensor, destination and interval.

    The plan does not depend on the order of `sources` and `destinations`.

    If several sources hold an element, the one on the destination's node is chosen (`nodes`: rank -> node; None if all are on one node), then
    the rank that sends the fewest elements so far, then the lowest rank. Raises ValueError, with name and interval, for an element that no
    source holds and for tensors whose shape differs between ranks.
    """
    boxes: dict[str, dict[Ranges, list[int]]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for source in sources:
        _check(source, shapes)
        if prod(_size(source.ranges)):
            boxes[source.name].setdefault(source.ranges, []).append(source.rank)
    source_slices = {name: _SourceSlices(ranks_of) for name, ranks_of in boxes.items()}
    planned: dict[int, int] = defaultdict(int)
    transfers = []
    for destination in sorted(destinations, key=lambda piece: (piece.name, piece.rank, piece.ranges)):
        _check(destination, shapes)
        own_node = None if nodes is None else nodes[destination.rank]

        def preference(rank: int, node: Any = own_node) -> tuple[bool, int, int]:
            return nodes is not None and nodes[rank] != node, planned[rank], rank

        for rank, ranges in _cover(destination, source_slices.get(destination.name, _SourceSlices({})), preference):
            planned[rank] += prod(_size(ranges))
            transfers.append(Transfer(rank, destination.rank, destination.name, ranges))
    return tuple(transfers)


class _SourceSlices:
    """The slices of one tensor that the source ranks hold."""

    def __init__(self, slices: Mapping[Ranges, list[int]]) -> None:
        self._boxes = sorted(slices.items())
        self._starts = [ranges[0][0] for ranges, _ in self._boxes if ranges]
        self._reach = list(itertools.accumulate((ranges[0][1] for ranges, _ in self._boxes if ranges), max))
        """Running maximum of the interval ends along the first dimension."""

    def at(self, corner: Sequence[int]) -> Iterator[tuple[int, Ranges]]:
        """Yield (rank, intervals) of the slices that contain the element `corner`."""
        last = bisect.bisect_right(self._starts, corner[0]) if corner else len(self._boxes)
        for index in range(last - 1, -1, -1):
            if corner and self._reach[index] <= corner[0]:
                return  # nor does any box before it
            ranges, ranks = self._boxes[index]
            if all(low <= position < high for position, (low, high) in zip(corner, ranges, strict=True)):
                yield from ((rank, ranges) for rank in ranks)

    def gap(self, box: Ranges) -> Ranges:
        """Return a box in `box` that begins at its first element and that no source overlaps. The caller knows that no source has this element."""
        for ranges, _ in self._boxes:
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, ranges, strict=True)):
                ends = [(a, c if c > a else b) for (a, b), (c, _) in zip(box, ranges, strict=True)]
                dim = next(dim for dim, (before, after) in enumerate(zip(box, ends, strict=True)) if before != after)
                box = (*box[:dim], ends[dim], *box[dim + 1 :])
        return box


def _cover(
    destination: TensorSlice, sources: _SourceSlices, preference: Callable[[int], Any]
) -> Iterator[tuple[int, Ranges]]:
    """Cut the slice `destination` of a tensor into boxes that one source rank stores whole, and yield (source rank, box) for each.

    The boxes cover `destination` without overlap. Of several ranks that store the first element of what is left, the one with the smallest
    `preference` provides the box, as large as it stores.
    """
    uncovered = [destination.ranges]
    while uncovered:
        box = uncovered.pop()
        if not prod(_size(box)):
            continue
        corner = [start for start, _ in box]
        holders = [(rank, _intersection(box, ranges)) for rank, ranges in sources.at(corner)]
        if not holders:
            gap = sources.gap(box)
            raise ValueError(
                f"{destination.name!r} must be held by a source at {_text(gap)}, got none; {_text(destination.ranges)} is wanted"
            )
        rank, overlap = min(holders, key=lambda holder: (preference(holder[0]), -prod(_size(holder[1]))))
        yield rank, overlap
        uncovered += reversed(list(_remainder(box, overlap)))


def _intersection(first: Ranges, second: Ranges) -> Ranges:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def _remainder(box: Ranges, overlap: Ranges) -> Iterator[Ranges]:
    """Yield boxes that make up `box` without `overlap`. Both begin at the same element."""
    for dim, ((_, stop), (_, end)) in enumerate(zip(box, overlap, strict=True)):
        if end < stop:
            yield (*overlap[:dim], (end, stop), *box[dim + 1 :])


def _check(tensor_slice: TensorSlice, shapes: dict[str, tuple[int, ...]]) -> None:
    shape = shapes.setdefault(tensor_slice.name, tensor_slice.shape)
    if tensor_slice.shape != shape:
        raise ValueError(
            f"{tensor_slice.name!r} must have one shape, got {list(shape)} and {list(tensor_slice.shape)} for {_text(tensor_slice.ranges)}"
        )
    fits = len(tensor_slice.ranges) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(tensor_slice.ranges, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"slices of {tensor_slice.name!r} must lie in {list(shape)}, got {_text(tensor_slice.ranges)}")


def _size(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def _text(ranges: Ranges) -> str:
    return " x ".join(f"[{start}, {stop})" for start, stop in ranges) or "the scalar"


# --- carrying it out ----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A slice of a tensor in the memory of this rank."""

    ranges: Ranges
    tensor: "torch.Tensor"

    def part(self, ranges: Ranges) -> "torch.Tensor":
        """Return the elements of `ranges` as a view."""
        index = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ranges, self.ranges, strict=True))
        return self.tensor[index]

    def has(self, ranges: Ranges) -> bool:
        """Return whether the slice contains all of `ranges`."""
        return all(c <= a and b <= d for (a, b), (c, d) in zip(ranges, self.ranges, strict=True))


class Exchange:
    """The pending transfers of one `execute`."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.sent: list[torch.Tensor] = []
        """Messages being sent; referenced until they are complete."""
        self.arriving: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """(message being received, views that its elements are copied to, in order)."""

    def wait(self) -> None:
        """Wait for the transfers of this rank and write what was received to its destination."""
        for work in self.works:
            work.wait()
        for message, places in self.arriving:
            chunks = message.split([place.numel() for place in places])
            for place, values in zip(places, chunks, strict=True):
                place.copy_(values.view(place.shape))
        self.sent.clear()
        self.arriving.clear()


def execute(
    plan: Iterable[Transfer],
    *,
    rank: int,
    held: Mapping[str, Sequence[Held]],
    room: Mapping[str, Held],
    dtypes: Mapping[str, "torch.dtype"],
    device: "torch.device | str" = "cpu",
) -> Exchange:
    """Start this rank's part of `plan` in the default process group, with one message per other rank and type.

    `held`: the slices that this rank sends from, by name. `room`: the memory that received parts are written to. `dtypes`: the type in which the
    elements of each tensor are sent. All ranks must call it with plans in the same order.
    """
    import torch
    import torch.distributed as dist

    exchange, operations = Exchange(), list[dist.P2POp]()
    outgoing: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    incoming: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for transfer in plan:
        dtype = dtypes[transfer.name]
        if transfer.source == rank:
            tensor = next(
                tensor_slice for tensor_slice in held[transfer.name] if tensor_slice.has(transfer.ranges)
            ).part(transfer.ranges)
            if transfer.destination == rank:
                room[transfer.name].part(transfer.ranges).copy_(tensor)
            else:
                outgoing[transfer.destination, dtype].append(tensor.reshape(-1).to(dtype))
        elif transfer.destination == rank:
            incoming[transfer.source, dtype].append(room[transfer.name].part(transfer.ranges))
    for (peer, dtype), places in incoming.items():
        message = torch.empty(sum(place.numel() for place in places), dtype=dtype, device=device)
        exchange.arriving.append((message, places))
        operations.append(dist.P2POp(dist.irecv, message, peer))
    for (peer, _), parts in outgoing.items():
        message = torch.cat(parts)
        exchange.sent.append(message)
        operations.append(dist.P2POp(dist.isend, message, peer))
    if operations:
        # Together: sent one by one, NCCL would make a communicator for each pair of ranks, and could not overlap them.
        exchange.works += dist.batch_isend_irecv(operations)
    return exchange
