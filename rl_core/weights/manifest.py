"""What a version of the weights is: names, shapes, types and checksums in wire order, and one digest over all of it.

Built by the publisher, sent as canonical msgpack, compared by every receiver. A version is served only by who holds the
bytes this manifest describes (invariant I2).
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from rl_core.api.errors import DataError
from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights import words

if TYPE_CHECKING:
    import torch

_FLOATING = frozenset(name for name in CODES if "float" in name)
_DEVICE_CHUNK = 1 << 24
"""Words summed at once on an accelerator; bounds the 64-bit temporaries at 128 MiB each."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One name of the model."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Full shape."""
    dtype: str
    """Type on the wire, after the cast: "float32", "bfloat16", ..."""
    nbytes: int
    """Size on the wire; an alias has the size of what it names and sends nothing."""
    checksum: tuple[int, int]
    """`checksum` of the bytes on the wire."""
    alias_of: str | None = None
    """The entry whose bytes this tied name shares; None = travels itself."""


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """A version of the weights. Raises ValueError for no entries, duplicate names or an alias of nothing."""

    version: int
    """Policy version, rising inside an epoch."""
    epoch: int
    """Epoch of the actor that trained it."""
    entries: tuple[WeightEntry, ...]
    """In wire order."""
    base_version: int | None = None
    """Version a patch applies to; None = full weights."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("a manifest must have at least one tensor, got none; pass the model's parameters")
        travelling = set()
        seen = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ValueError(f"names of a manifest must be unique, got {entry.name!r} twice; drop one")
            seen.add(entry.name)
            if entry.alias_of is None:
                travelling.add(entry.name)
            elif entry.alias_of not in travelling:
                raise ValueError(f"{entry.name!r} must be an alias of an earlier tensor, got {entry.alias_of!r}")

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes that travel: aliases count nothing."""
        return sum(entry.nbytes for entry in self.entries if entry.alias_of is None)

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the canonical msgpack, in hex: proves version, epoch, names and contents."""
        return blake2b(self.packed, digest_size=16).hexdigest()

    @functools.cached_property
    def packed(self) -> bytes:
        """The canonical msgpack: [version, epoch, base_version, entries, total_bytes], entries as lists in wire order."""
        rows = [[e.name, e.shape, e.dtype, e.nbytes, e.checksum, e.alias_of] for e in self.entries]
        packed: bytes = msgpack.packb([self.version, self.epoch, self.base_version, rows, self.total_bytes])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "WeightManifest":
        """Return the manifest of `packed`. Raises DataError when the bytes are not one or disagree with themselves."""
        try:
            version, epoch, base_version, rows, total = msgpack.unpackb(packed)
            manifest = cls(
                version=checked_int(version),
                epoch=checked_int(epoch),
                base_version=None if base_version is None else checked_int(base_version),
                entries=tuple(_entry(*row) for row in rows),
            )
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise DataError(f"weight manifest of {len(packed)} bytes is malformed: {error}") from error
        if manifest.total_bytes != total:
            raise DataError(f"weight manifest must total {manifest.total_bytes} bytes by its entries, says {total}")
        return manifest


def _entry(
    name: str, shape: Sequence[int], dtype: str, nbytes: int, sums: Sequence[int], alias_of: str | None
) -> WeightEntry:
    shape = tuple(map(checked_int, shape))
    expected = prod(shape) * ITEMSIZES[CODES[dtype]]
    if checked_int(nbytes) != expected:
        raise ValueError(f"{name!r} of {dtype} {list(shape)} must have {expected} bytes, got {nbytes}")
    first, second = map(checked_int, sums)
    alias_of = None if alias_of is None else checked_text(alias_of)
    return WeightEntry(checked_text(name), shape, dtype, nbytes, (first, second), alias_of)


def checked_int(value: Any) -> int:
    """Return `value`, which came over the wire. Raises TypeError or ValueError when it is not a number from 0."""
    if type(value) is not int:
        raise TypeError(f"a number must be an integer, got {value!r}")
    if value < 0:
        raise ValueError(f"a number must be 0 or more, got {value}")
    return value


def checked_text(value: Any) -> str:
    """Return `value`, which came over the wire. Raises TypeError when it is not a text."""
    if type(value) is not str:
        raise TypeError(f"a name must be a text, got {value!r}")
    return value


def checksum(tensor: "torch.Tensor", offset: int = 0) -> tuple[int, int]:
    """Return (sum w_i, sum (i + 1) w_i), each mod 2^64, over the bytes of `tensor` as little-endian 32-bit words.

    The bytes are padded with zeros to whole words. `offset` is the position of the first word in the full tensor: the
    checksums of contiguous slices (cut at whole words) add up to that of the whole. Computed where the tensor lives.
    Raises ValueError for a negative offset.
    """
    if offset < 0:
        raise ValueError(f"offset must be 0 or more 32-bit words, got {offset}")
    if tensor.device.type == "cpu":
        return words.sum_bytes(host_bytes(tensor), offset=offset)
    return _device_checksum(tensor, offset)


def host_bytes(tensor: "torch.Tensor") -> np.ndarray:
    """Return the bytes of a CPU tensor as uint8 [nbytes]: a view, or a copy when it is not contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    data: np.ndarray = flat.view(torch.uint8).numpy()
    return data


def _device_checksum(tensor: "torch.Tensor", offset: int) -> tuple[int, int]:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    values = data.view(torch.int32)
    total = (0, 0)
    for start in range(0, values.numel(), _DEVICE_CHUNK):
        block = values[start : start + _DEVICE_CHUNK].long() & 0xFFFFFFFF
        positions = torch.arange(1, block.numel() + 1, device=block.device)
        plain, weighted = int(block.sum()), int((block * positions).sum())  # int64 wraps, as the sums should
        total = words.add(total, (plain, weighted + plain * (start + offset)))
    return total


def wire_dtype(tensor: "torch.Tensor", dtype: str | None) -> str:
    """Return the type `tensor` travels in: `dtype` for floating ones (None = its own), its own for integers and bools."""
    own = str(tensor.dtype).removeprefix("torch.")
    if own not in CODES:
        raise ValueError(f"weights must be of one of {', '.join(CODES)}, got {own}; convert them first")
    return dtype if dtype is not None and own in _FLOATING else own


def build_manifest(
    tensors: Mapping[str, "torch.Tensor"] | Iterable[tuple[str, "torch.Tensor"]],
    *,
    version: int,
    epoch: int,
    dtype: str | None = None,
    base_version: int | None = None,
) -> WeightManifest:
    """Return the manifest of `tensors` in their order; floating ones are cast to `dtype` (None = kept) before the checksum.

    A tensor that is the same memory as an earlier one is listed as its alias. Raises ValueError for duplicate or no names.
    """
    import torch

    entries: list[WeightEntry] = []
    ties = TieFinder()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        wire = wire_dtype(tensor, dtype)
        sent = tensor.detach().to(getattr(torch, wire))
        entry = WeightEntry(name, tuple(sent.shape), wire, sent.numel() * sent.element_size(), checksum(sent))
        entries.append(ties.resolve(entry, tensor))
    return WeightManifest(version=version, epoch=epoch, base_version=base_version, entries=tuple(entries))


def tensor_place(tensor: "torch.Tensor") -> tuple[object, ...]:
    """Return what two names of one memory have in common while both tensors live."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class TieFinder:
    """Finds names of one memory. Tensors may be freed between two calls, so equal addresses must also hold equal bytes."""

    def __init__(self) -> None:
        self._at: dict[tuple[object, ...], WeightEntry] = {}

    def resolve(self, entry: WeightEntry, tensor: "torch.Tensor") -> WeightEntry:
        """Return `entry`, as an alias when an earlier one shares its memory."""
        place = tensor_place(tensor)
        known = self._at.get(place) if entry.nbytes else None
        if known is not None and known.checksum == entry.checksum:
            return replace(entry, alias_of=known.name)
        self._at[place] = entry
        return entry
