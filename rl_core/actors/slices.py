"""What one rank stores of a tensor: the shape in which weights are read, saved and published, whatever backend cut them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSlice:
    """A box of a tensor that this rank stores."""

    tensor: Tensor
    """The rank's own elements, sharing memory with the model; may be empty."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the slice's first element in the whole tensor."""
    replicated: bool
    """Every rank stores all of it."""

    @classmethod
    def of_whole(cls, tensor: Tensor) -> "LocalSlice":
        """Return the slice of a tensor that is not cut."""
        return cls(tensor=tensor, shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), replicated=True)

    @property
    def box(self) -> tuple[slice, ...]:
        """Return the index of the slice in the whole tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.offset, self.tensor.shape, strict=True))
