"""Which part of a tensor goes from which rank to which, and the messages that carry it.

Both sides say what they hold in intervals of the Hugging Face tensors. Whatever cuts them (tensor, pipeline, data parallel,
evenly or not), the plan follows from these slices alone: every rank makes the same one without a word. Torch is needed by
`execute` only.
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
"""One half-open interval per dimension of the Hugging Face tensor."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What `rank` holds, or is to hold, of a tensor."""

    rank: int
    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a tensor that goes from the rank `source` to the rank `destination`."""

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
    """Return the transfers that give every element of the destinations from one source, in the order of the destinations.

    Of several sources the one on the destination's node is taken (`nodes`: rank -> node; None = all on one), then the rank
    from which the fewest elements go so far, then the lowest. Raises ValueError for an element that no source has, and where the two
    sides disagree about a shape, with name and interval.
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
    for one in destinations:
        _check(one, shapes)

        def preference(rank: int, node: Any = None if nodes is None else nodes[one.rank]) -> tuple[bool, int, int]:
            return nodes is not None and nodes[rank] != node, planned[rank], rank

        for rank, ranges in _cover(one, offered.get(one.name, _Offered({})), preference):
            planned[rank] += prod(_size(ranges))
            transfers.append(Transfer(rank, one.rank, one.name, ranges))
    return tuple(transfers)


class _Offered:
    """Who has which boxes of one tensor."""

    def __init__(self, held: Mapping[Ranges, list[int]]) -> None:
        self._boxes = sorted(held.items())
        self._starts = [ranges[0][0] for ranges, _ in self._boxes if ranges]
        self._reach = list(itertools.accumulate((ranges[0][1] for ranges, _ in self._boxes if ranges), max))
        """How far each box or one before it goes along the first dimension."""

    def at(self, corner: Sequence[int]) -> Iterator[tuple[int, Ranges]]:
        """Yield (rank, box) for the boxes that have the element `corner`."""
        last = bisect.bisect_right(self._starts, corner[0]) if corner else len(self._boxes)
        for index in range(last - 1, -1, -1):
            if corner and self._reach[index] <= corner[0]:
                return  # nor does any box before it
            ranges, ranks = self._boxes[index]
            if all(low <= at < high for at, (low, high) in zip(corner, ranges, strict=True)):
                yield from ((rank, ranges) for rank in ranks)


def _cover(wanted: TensorSlice, offered: _Offered, preference: Callable[[int], Any]) -> Iterator[tuple[int, Ranges]]:
    """Yield (rank, part) for parts that make up `wanted`; each is the most that the preferred rank has from where it begins."""
    left = [wanted.ranges]
    while left:
        part = left.pop()
        if not prod(_size(part)):
            continue
        corner = [start for start, _ in part]
        holders = [(rank, _common(part, ranges)) for rank, ranges in offered.at(corner)]
        if not holders:
            raise ValueError(
                f"{wanted.name!r} must be held by a source at {_text(part)}, got none that has its first element"
            )
        rank, taken = min(holders, key=lambda one: (preference(one[0]), -prod(_size(one[1]))))
        yield rank, taken
        left += reversed(list(_rest(part, taken)))


def _common(first: Ranges, second: Ranges) -> Ranges:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def _rest(part: Ranges, taken: Ranges) -> Iterator[Ranges]:
    """Yield what is left of `part` without `taken`, which begins where it does, as boxes."""
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
    """A box of a tensor in this rank's memory."""

    ranges: Ranges
    tensor: "torch.Tensor"

    def part(self, ranges: Ranges) -> "torch.Tensor":
        """Return the elements of `ranges`, a view."""
        index = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ranges, self.ranges, strict=True))
        return self.tensor[index]

    def has(self, ranges: Ranges) -> bool:
        """Return whether all of `ranges` is in the box."""
        return all(c <= a and b <= d for (a, b), (c, d) in zip(ranges, self.ranges, strict=True))


class Exchange:
    """The transfers of one `execute` on their way."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.sent: list[torch.Tensor] = []
        """Held until they are through."""
        self.arriving: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """(message, where its elements go, in order)."""

    def wait(self) -> None:
        """Wait until this rank's transfers are through; what it receives is in place then."""
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
    """Set this rank's part of `plan` off in the default process group: one message for each other rank and type.

    `held`: what it gives, by name. `room`: where what it gets belongs, of the types `dtypes`, in which elements travel. All ranks
    call it with plans of one order.
    """
    import torch
    import torch.distributed as dist

    exchange = Exchange()
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
        exchange.works.append(dist.irecv(message, other))
    for (other, _), parts in outgoing.items():
        message = torch.cat(parts)
        exchange.sent.append(message)
        exchange.works.append(dist.isend(message, other))
    return exchange
