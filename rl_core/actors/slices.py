"""Which part of a tensor a rank stores, told by Hugging Face name, whatever backend cut it."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSlice:
    """A box of a tensor that this rank stores, or a run of its elements, row by row."""

    tensor: Tensor
    """The rank's own elements, sharing memory with the model; may be empty. Of a run: [elements]."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the slice's first element in the whole tensor."""
    replicated: bool
    """Every rank stores all of it."""
    run: bool = False
    """The elements follow each other in the whole tensor, wherever in a row they begin and end."""

    @classmethod
    def of_whole(cls, tensor: Tensor) -> "LocalSlice":
        """Return the slice of a tensor that is not cut."""
        return cls(tensor=tensor.detach(), shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), replicated=True)

    @classmethod
    def of_run(cls, tensor: Tensor, shape: tuple[int, ...], start: int) -> "LocalSlice":
        """Return the slice of a tensor of that shape whose elements from number `start` on are `tensor` [elements]."""
        offset = []
        for width in (prod(shape[dim + 1 :]) for dim in range(len(shape))):
            at, start = divmod(start, width)
            offset.append(at)
        return cls(tensor=tensor, shape=shape, offset=tuple(offset), replicated=False, run=True)

    @property
    def box(self) -> tuple[slice, ...]:
        """Return the index of the slice in the whole tensor; of one that is no run."""
        return tuple(slice(start, start + n) for start, n in zip(self.offset, self.tensor.shape, strict=True))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the interval of each dimension that the slice has of the whole tensor; of one that is no run."""
        return tuple((start, start + n) for start, n in zip(self.offset, self.tensor.shape, strict=True))

    def boxes(self) -> "list[LocalSlice]":
        """Return the boxes that make up the slice: itself, or what a run has of a row where it begins, whole rows, and the rest."""
        if not self.run:
            return [self]
        widths = (prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        start = sum(at * width for at, width in zip(self.offset, widths, strict=True))
        return [
            LocalSlice(tensor=part, shape=self.shape, offset=offset, replicated=self.replicated)
            for part, offset in _boxes(self.tensor, self.shape, start)
        ]


def _boxes(run: Tensor, shape: tuple[int, ...], start: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield (view of `run` as a box, its offset) for elements from `start` on of a tensor of that shape."""
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
