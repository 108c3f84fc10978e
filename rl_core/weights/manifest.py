"""The manifest of a version of the weights: name, shape, type and checksum of every tensor, and one digest over all of them.

The publisher builds the manifest and sends it as canonical msgpack. A receiver serves a version only after it has checked that
its memory holds the bytes that the manifest describes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from rl_core.api.errors import DataError
from rl_core.transports.dtypes import CODES, ITEMSIZES
from rl_core.weights import checksums

if TYPE_CHECKING:
    import torch

_ADAPTER = frozenset(("lora_A", "lora_B"))
_FLOATING = frozenset(name for name in CODES if "float" in name)
_DEVICE_CHUNK = 1 << 24
"""Number of 32-bit words summed at once on an accelerator. It limits each 64-bit temporary tensor to 128 MiB."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One named tensor of the model."""

    name: str
    """Name of the parameter in the Hugging Face model."""
    shape: tuple[int, ...]
    """Shape of the whole (unsharded) tensor."""
    dtype: str
    """Type that is sent, after the cast: "float32", "bfloat16", ..."""
    nbytes: int
    """Size in the type that is sent. An alias has the size of the tensor it names, although nothing is sent for it."""
    checksum: tuple[int, int]
    """`checksum` of the bytes that are sent."""
    alias_of: str | None = None
    """Name of the earlier entry that this tied parameter shares its bytes with; None if its own bytes are sent."""


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """The tensors of one version. Raises ValueError for no entries, duplicate names, or an alias of a tensor that is not listed before it."""

    version: int
    """Policy version. It only rises within an epoch."""
    epoch: int
    """Epoch of the actor that trained this version."""
    entries: tuple[WeightEntry, ...]
    """The tensors in the order in which they are sent."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("a manifest must have at least one tensor, got none; pass the model's parameters")
        sent_names = set()
        names = set()
        for entry in self.entries:
            if entry.name in names:
                raise ValueError(f"names of a manifest must be unique, got {entry.name!r} twice; drop one")
            names.add(entry.name)
            if entry.alias_of is None:
                sent_names.add(entry.name)
            elif entry.alias_of not in sent_names:
                raise ValueError(f"{entry.name!r} must be an alias of an earlier tensor, got {entry.alias_of!r}")

    @functools.cached_property
    def total_bytes(self) -> int:
        """Number of bytes that are sent; aliases count as 0."""
        return sum(entry.nbytes for entry in self.entries if entry.alias_of is None)

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of `packed`, in hex. It identifies version, epoch, names and contents."""
        return blake2b(self.packed, digest_size=16).hexdigest()

    @functools.cached_property
    def base_digest(self) -> str:
        """BLAKE2b-128 of the tensors that are no adapters, in hex; "" for a model without adapters.

        Versions with equal base digests differ in their adapters only.
        """
        rows = [_row(entry) for entry in self.entries if not is_adapter_name(entry.name)]
        if len(rows) == len(self.entries):
            return ""
        return blake2b(msgpack.packb(rows), digest_size=16).hexdigest()

    @functools.cached_property
    def packed(self) -> bytes:
        """Canonical msgpack of [version, epoch, entries, total_bytes]; each entry is a list of its fields."""
        rows = list(map(_row, self.entries))
        packed: bytes = msgpack.packb([self.version, self.epoch, rows, self.total_bytes])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "WeightManifest":
        """Return the manifest that `packed` encodes. Raises DataError if the bytes are malformed or their sizes are inconsistent."""
        try:
            version, epoch, rows, total = msgpack.unpackb(packed)
            manifest = cls(
                version=checked_int(version),
                epoch=checked_int(epoch),
                entries=tuple(_entry(*row) for row in rows),
            )
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise DataError(f"weight manifest of {len(packed)} bytes is malformed: {error}") from error
        if manifest.total_bytes != total:
            raise DataError(f"weight manifest must total {manifest.total_bytes} bytes by its entries, says {total}")
        return manifest


def is_adapter_name(name: str) -> bool:
    """Return whether the tensor called `name` belongs to an adapter (LoRA); adapters are named as in `peft`."""
    return not _ADAPTER.isdisjoint(name.split("."))


def _row(entry: WeightEntry) -> list[Any]:
    return [entry.name, entry.shape, entry.dtype, entry.nbytes, entry.checksum, entry.alias_of]


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
    """Return `value`, an integer of a received message. Raises TypeError if it is not an integer, ValueError if it is negative."""
    if type(value) is not int:
        raise TypeError(f"a number must be an integer, got {value!r}")
    if value < 0:
        raise ValueError(f"a number must be 0 or more, got {value}")
    return value


def checked_text(value: Any) -> str:
    """Return `value`, a string of a received message. Raises TypeError if it is not a string."""
    if type(value) is not str:
        raise TypeError(f"a name must be a text, got {value!r}")
    return value


def checksum(tensor: "torch.Tensor", offset: int = 0) -> tuple[int, int]:
    """Return (sum w_i, sum (i + 1) w_i), each mod 2^64, over the bytes of `tensor` as little-endian 32-bit words.

    The bytes are padded with zeros to whole words. `offset` is the index of the first word in the full tensor, so that the
    checksums of contiguous slices (cut at whole words) add up to the checksum of the full tensor. The sum is computed on the
    device of the tensor. Raises ValueError for a negative offset.
    """
    if offset < 0:
        raise ValueError(f"offset must be 0 or more 32-bit words, got {offset}")
    if tensor.device.type == "cpu":
        return checksums.sum_bytes(host_bytes(tensor), offset=offset)
    return _device_checksum(tensor, offset)


def host_bytes(tensor: "torch.Tensor") -> np.ndarray:
    """Return the bytes of a CPU tensor as uint8 [nbytes]: a view if the tensor is contiguous, else a copy."""
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
        total = checksums.add(total, (plain, weighted + plain * (start + offset)))
    return total


def wire_dtype(tensor: "torch.Tensor", dtype: str | None) -> str:
    """Return the type that `tensor` is sent in: `dtype` for floating-point tensors (None: their own), their own for integers and booleans."""
    own_dtype = str(tensor.dtype).removeprefix("torch.")
    if own_dtype not in CODES:
        raise ValueError(f"weights must be of one of {', '.join(CODES)}, got {own_dtype}; convert them first")
    return dtype if dtype is not None and own_dtype in _FLOATING else own_dtype
