"""Where a version of the weights comes from: the interface between a trainer and weight sync.

A trainer first gives names, shapes and types, then the data as buckets on the device where they are. Consumers take one bucket after the
other, such as the host copy (`host_copy`); the whole model is never requested at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights.bucket import Bucket, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One named tensor of the model, described before its data is available."""

    name: str
    """Name of the parameter in the Hugging Face model."""
    shape: tuple[int, ...]
    """Shape of the whole (unsharded) tensor."""
    dtype: str
    """Type that is sent: "float32", "bfloat16", ..."""
    alias_of: str | None = None
    """Name of the earlier entry that this tied parameter shares its bytes with; None if its own bytes are sent."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are sent."""
        return prod(self.shape) * ITEMSIZES[CODES[self.dtype]]


@dataclass(frozen=True, slots=True)
class SourceBucket:
    """The tensors of one bucket. They are valid until the next bucket is requested."""

    place: Bucket
    """Entries of the bucket and their positions in the layout."""
    tensors: "tuple[torch.Tensor, ...]"
    """Whole tensors in the order of `place.entries`, in the types that are sent."""


class VersionSource(Protocol):
    """The weights of one version. Implemented by the source of each training backend."""

    @property
    def entries(self) -> Sequence[SourceEntry]:
        """Return every tensor in the order of sending. Aliases come after the tensor that they name."""
        ...

    @property
    def layout(self) -> Layout:
        """Return how the entries are divided into buckets."""
        ...

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets of `layout` in order, on `device`. Called once per version.

        If the weights are sharded, this is a collective operation: every rank of the trainer takes part, and one of them gets the data.
        """
        ...
