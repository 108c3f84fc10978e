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
    for one in sources:
        _check(one, shapes)
        if prod(_size(one.ranges)):
            boxes[one.name].setdefault(one.ranges, []).append(one.rank)
    offered = {name: _Offered(held) for name, held in boxes.items()}
    planned: dict[int, int] = defaultdict(int)
    transfers = []
    for one in sorted(destinations, key=lambda one: (one.name, one.rank, one.ranges)):
        _check(one, shapes)

        def preference(rank: int, node: Any = None if nodes is None else nodes[one.rank]) -> tuple[bool, int, int]:
            return nodes is not None and nodes[rank] != node, planned[rank], rank

        for rank, ranges in _cover(one, offered.get(one.name, _Offered({})), preference):
            planned[rank] += prod(_size(ranges))
            transfers.append(Transfer(rank, one.rank, one.name, ranges))
    return tuple(transfers)


class _Offered:
    """The slices of one tensor that the source ranks hold."""

    def __init__(self, held: Mapping[Ranges, list[int]]) -> None:
        self._boxes = sorted(held.items())
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
            if all(low <= at < high for at, (low, high) in zip(corner, ranges, strict=True)):
                yield from ((rank, ranges) for rank in ranks)

    def gap(self, part: Ranges) -> Ranges:
        """Return a box in `part` that begins at its first element and that no source overlaps. The caller knows that no source has this element."""
        for ranges, _ in self._boxes:
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(part, ranges, strict=True)):
                ends = [(a, c if c > a else b) for (a, b), (c, _) in zip(part, ranges, strict=True)]
                dim = next(dim for dim, (before, after) in enumerate(zip(part, ends, strict=True)) if before != after)
                part = (*part[:dim], ends[dim], *part[dim + 1 :])
        return part


def _cover(wanted: TensorSlice, offered: _Offered, preference: Callable[[int], Any]) -> Iterator[tuple[int, Ranges]]:
    """Yield (rank, part) for parts that make up `wanted`. Each part is the largest that the preferred rank has from the part's first element."""
    left = [wanted.ranges]
    while left:
        part = left.pop()
        if not prod(_size(part)):
            continue
        corner = [start for start, _ in part]
        holders = [(rank, _common(part, ranges)) for rank, ranges in offered.at(corner)]
        if not holders:
            missing = offered.gap(part)
            raise ValueError(
                f"{wanted.name!r} must be held by a source at {_text(missing)}, got none; {_text(wanted.ranges)} is wanted"
            )
        rank, taken = min(holders, key=lambda one: (preference(one[0]), -prod(_size(one[1]))))
        yield rank, taken
        left += reversed(list(_rest(part, taken)))


def _common(first: Ranges, second: Ranges) -> Ranges:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def _rest(part: Ranges, taken: Ranges) -> Iterator[Ranges]:
    """Yield boxes that make up `part` without `taken`. Both boxes begin at the same element."""
    for dim, ((_, stop), (_, end)) in enumerate(zip(part, taken, strict=True)):
        if end < stop:
            yield (*taken[:dim], (end, stop), *part[dim + 1 :])


def _check(one: TensorSlice, shapes: dict[str, tuple[int, ...]]) -> None:
    shape = shapes.setdefault(one.name, one.shape)
    if one.shape != shape:
        raise ValueError(
            f"{one.name!r} must have one shape, got {list(shape)} and {list(one.shape)} for {_text(one.ranges)}"
        )
    fits = len(one.ranges) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(one.ranges, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"slices of {one.name!r} must lie in {list(shape)}, got {_text(one.ranges)}")


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
            parts = message.split([place.numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                place.copy_(part.view(place.shape))
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
    for one in plan:
        dtype = dtypes[one.name]
        if one.source == rank:
            part = next(box for box in held[one.name] if box.has(one.ranges)).part(one.ranges)
            if one.destination == rank:
                room[one.name].part(one.ranges).copy_(part)
            else:
                outgoing[one.destination, dtype].append(part.reshape(-1).to(dtype))
        elif one.destination == rank:
            incoming[one.source, dtype].append(room[one.name].part(one.ranges))
    for (other, dtype), places in incoming.items():
        message = torch.empty(sum(place.numel() for place in places), dtype=dtype, device=device)
        exchange.arriving.append((message, places))
        operations.append(dist.P2POp(dist.irecv, message, other))
    for (other, _), parts in outgoing.items():
        message = torch.cat(parts)
        exchange.sent.append(message)
        operations.append(dist.P2POp(dist.isend, message, other))
    if operations:
        # Together: sent one by one, NCCL would make a communicator for each pair of ranks, and could not overlap them.
        exchange.works += dist.batch_isend_irecv(operations)
    return exchange
