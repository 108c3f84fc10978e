"""The part of a tensor that a rank stores, independent of the backend that sharded the tensor.

A box is a rectangular part: one interval per dimension. A range is a contiguous part of the tensor's elements in row-major order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from rl_core.weights.stored_parts import StoredPart, in_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSlice:
    """A box or a range of a tensor that this rank stores."""

    tensor: Tensor
    """The elements that the rank stores, sharing memory with the model. May be empty. A range has the shape [elements]."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the slice's first element in the whole tensor."""
    replicated: bool
    """Whether every rank stores the whole tensor."""
    is_range: bool = False
    """Whether the part is a range, which may begin and end inside a row. Otherwise it is a box."""

    @classmethod
    def of_whole(cls, tensor: Tensor) -> "LocalSlice":
        """Return the slice of a tensor that is not sharded."""
        return cls(tensor=tensor.detach(), shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), replicated=True)

    @classmethod
    def of_range(cls, tensor: Tensor, shape: tuple[int, ...], start: int) -> "LocalSlice":
        """Return the slice for a range of a tensor of shape `shape`.

        `tensor` [elements] holds its elements, and `start` is the row-major index of the first one.
        """
        offset = []
        for width in (prod(shape[dim + 1 :]) for dim in range(len(shape))):
            index, start = divmod(start, width)
            offset.append(index)
        return cls(tensor=tensor, shape=shape, offset=tuple(offset), replicated=False, is_range=True)

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices that index this box in the whole tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.offset, self.tensor.shape, strict=True))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The half-open interval of this box in each dimension of the whole tensor."""
        return tuple((start, start + n) for start, n in zip(self.offset, self.tensor.shape, strict=True))

    def boxes(self) -> "list[LocalSlice]":
        """Return the boxes that make up the slice.

        For a box that is the box itself. A range consists of the end of its first row, whole rows, and the beginning of its last row.
        """
        if not self.is_range:
            return [self]
        widths = (prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        start = sum(index * width for index, width in zip(self.offset, widths, strict=True))
        return [
            LocalSlice(tensor=part, shape=self.shape, offset=offset, replicated=self.replicated)
            for part, offset in _boxes(self.tensor, self.shape, start)
        ]

    def part(self, part: StoredPart) -> "list[LocalSlice]":
        """Return what this slice has of `part` of the tensor, as boxes of the stored tensor: one without elements where it has none."""
        pieces = []
        for box in self.boxes():
            low = [max(start, first) for (start, _), first in zip(part.box, box.offset, strict=True)]
            high = [min(stop, end) for (_, stop), (_, end) in zip(part.box, box.ranges, strict=True)]
            if any(stop <= start for start, stop in zip(low, high, strict=True)):
                continue
            index_in_box = (slice(a - first, b - first) for a, b, first in zip(low, high, box.offset, strict=True))
            tensor = box.tensor[tuple(index_in_box)]
            pieces.append((tensor.view([tensor.shape[dim] for dim in part.kept]), low))
        if not pieces:
            pieces = [(self.tensor.new_empty((0,) * len(part.kept)), [start for start, _ in part.box])]
        return [
            LocalSlice(
                tensor=tensor,
                shape=part.shape,
                offset=tuple(low[dim] - part.box[dim][0] for dim in part.kept),
                replicated=self.replicated,
            )
            for tensor, low in pieces
        ]


Slices = Mapping[str, Sequence[LocalSlice]]
"""Hugging Face name -> the parts of that tensor that a rank stores."""


def slices_in_folder(slices: Mapping[str, LocalSlice], parts: Mapping[str, StoredPart]) -> Slices:
    """Return the slices of the tensors of a model folder, given those of the parameters and buffers by their names in the model."""
    return {
        name: slices[parts[name].parameter].part(parts[name]) if name in parts else [slices[name]]
        for name in in_folder(slices, parts)
    }


def _boxes(run: Tensor, shape: tuple[int, ...], start: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield (a view of `run` as a box, its offset) for each box of a run that begins at element `start` of a tensor of that shape."""
    if not run.numel():
        return
    if len(shape) < 2:
        yield run.view(run.shape[: len(shape)]), (start,) * len(shape)
        return
    width, zeros = prod(shape[1:]), (0,) * (len(shape) - 1)
    while run.numel():
        row, inside = divmod(start, width)
        if inside or run.numel() < width:
            count = min(width - inside, run.numel())
            for part, offset in _boxes(run[:count], shape[1:], inside):
                yield part.unsqueeze(0), (row, *offset)
        else:
            count = run.numel() // width * width
            yield run[:count].view(-1, *shape[1:]), (row, *zeros)
        run, start = run[count:], start + count
