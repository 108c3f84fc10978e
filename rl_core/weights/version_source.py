"""Where a version of the weights comes from: the port between a trainer and weight sync.

A trainer gives names, shapes and types before any data, and then the data as buckets on the device where they are. Consumers
take the buckets one by one: the host copy for who needs one (`host_copy`). Nobody asks for the whole model at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights.bucket import DEFAULT_BUCKET_BYTES, Bucket, Layout
from rl_core.weights.manifest import tensor_place, wire_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One name of the model, known before its data."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Full shape."""
    dtype: str
    """Type on the wire: "float32", "bfloat16", ..."""
    alias_of: str | None = None
    """The earlier entry whose bytes this tied name shares; None = travels itself."""

    @property
    def nbytes(self) -> int:
        """Return the size on the wire."""
        return prod(self.shape) * ITEMSIZES[CODES[self.dtype]]


@dataclass(frozen=True, slots=True)
class SourceBucket:
    """The tensors of one bucket; valid until the next bucket is asked for."""

    place: Bucket
    """Which entries they are, and where they belong in the whole."""
    tensors: "tuple[torch.Tensor, ...]"
    """Whole tensors in the order of `place.entries`, in their types on the wire."""


class VersionSource(Protocol):
    """The weights of one version. Implemented by each training backend, and by `StateSource` for a dict of tensors."""

    @property
    def entries(self) -> Sequence[SourceEntry]:
        """Return every name in wire order; aliases come after what they name."""
        ...

    @property
    def layout(self) -> Layout:
        """Return how the entries are cut into buckets."""
        ...

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets of `layout` in order, on `device`; once per version.

        Where the weights are sharded this is collective: every rank of the trainer takes part, one of them gets the data.
        """
        ...


class StateSource:
    """A mapping of whole tensors as a version. Names of one memory are tied. For stand-alone use: tests, benchmarks."""

    def __init__(
        self,
        tensors: "Mapping[str, torch.Tensor]",
        *,
        dtype: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        """`dtype`: type of floating tensors on the wire; None = their own. Raises ValueError for no tensors."""
        self._tensors = tensors
        found: dict[tuple[object, ...], str] = {}
        entries = []
        for name, tensor in tensors.items():
            first = found.setdefault(tensor_place(tensor), name) if tensor.numel() else name
            wire = wire_dtype(tensor, dtype)
            entries.append(SourceEntry(name, tuple(tensor.shape), wire, first if first != name else None))
        self.entries: tuple[SourceEntry, ...] = tuple(entries)
        self.layout = Layout.of(self.entries, bucket_bytes)

    def buckets(self, device: str) -> Iterator[SourceBucket]:
        """Yield the buckets on `device`."""
        import torch

        for place in self.layout.buckets:
            members = [self.entries[index] for index in place.entries]
            tensors = [self._tensors[one.name].detach().to(device, getattr(torch, one.dtype)) for one in members]
            yield SourceBucket(place, tuple(tensors))
