"""`LoadedLayout`: records where SGLang's own loader writes each tensor of a checkpoint, and computes checksums of these places later.

Runs in each tensor-parallel process of the engine. While the model loads weights, each copy from a given tensor into a parameter is
recorded as a piece: a part of the tensor and its place in the parameter. This works for every model that SGLang can load, because fused,
split and padded parameters are recorded as the loader fills them. The checksums of all pieces of a tensor, on all ranks, add up to the
checksum of the tensor in the manifest (`weights.manifest.checksum`).

In host memory a piece can be read right after it was copied, block by block, while it is in the processor's cache. Such a checksum counts
as long as torch writes nothing else to that place (`CopiedSums`); otherwise the piece is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.weights import checksums
from rl_core.weights.checksums import Checksum
from rl_core.weights.manifest import checksum, host_bytes

CHUNK = 1 << 22
"""Elements whose checksum is computed at once; it limits the temporary tensors to 32 MiB each."""
_MASK = (1 << 64) - 1


class Region(NamedTuple):
    """A strided part of a tensor, in elements from its first one."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a given tensor that one copy wrote into a parameter."""

    source: Region
    parameter: str
    place: Region


class CopiedSums:
    """Keeps the checksums computed while pieces were copied. A checksum is dropped when torch writes to the memory of its piece."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[int, int], tuple[Region, Checksum]]] = {}
        """Address of the storage -> (first byte, end) of the place -> (part of the given tensor, checksum)."""

    def __bool__(self) -> bool:
        return bool(self._sums)

    def clear(self) -> None:
        """Drop all checksums, so that pieces are read when their checksums are requested."""
        self._sums.clear()

    def copy(self, place: Tensor, source: Tensor, region: Region) -> None:
        """Copy `source`, the part `region` of a sent tensor, to `place`, and store the checksum of `place` after the copy."""
        self.overwritten(place)
        offset = region.offset * place.element_size() // 4
        sums = checksums.copy_and_read_back(host_bytes(place), host_bytes(source), offset=offset)
        self._sums.setdefault(place.untyped_storage().data_ptr(), {})[_span(place)] = region, sums

    def overwritten(self, place: Tensor) -> None:
        """Forget the checksums of all that shares memory with `place`, which is about to be written."""
        sums = self._sums.get(place.untyped_storage().data_ptr(), {})
        start, end = _span(place)
        for span in [span for span in sums if span[0] < end and start < span[1]]:
            del sums[span]

    def find(self, place: Tensor, region: Region) -> Checksum | None:
        """Return the kept checksum of the part `region` of a given tensor at `place`. None if there is none or `place` is not contiguous."""
        copies = self._sums.get(place.untyped_storage().data_ptr(), {})
        source, sums = copies.get(_span(place), (None, None))
        return sums if source == region and place.is_contiguous() else None


class LoadedLayout:
    """The pieces of all checkpoint tensors that were loaded into the model of this rank."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        """By the tensor's name, as of its first load. A later load that writes elsewhere shows in the checksums."""
        self._sums = CopiedSums()
        """Of the last load from a source."""

    def record(
        self, model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]], *, sum_copies: bool = False
    ) -> None:
        """Let `model` load `tensors`, and record the pieces of those whose names this layout has not seen before.

        With `sum_copies` the checksum of a piece in host memory is computed while it is copied, and kept. Otherwise all kept checksums are
        dropped, and the method `checksums` reads the pieces.
        """
        named_tensors = list(tensors)
        new = {name: tensor for name, tensor in named_tensors if name not in self._pieces}
        if not sum_copies:
            self._sums.clear()
        if not new and not sum_copies:
            model.load_weights(named_tensors)
            return
        parameters, sums = dict(model.named_parameters()), self._sums if sum_copies else None
        with _Copies(dict(named_tensors) if sum_copies else new, parameters, sums) as copies:
            model.load_weights(named_tensors)
        self._pieces.update({name: copies.pieces[name] for name in new})

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters may be changed after a load: pieces that torch writes there are read again."""
        return _Copies({}, {}, self._sums) if self._sums else nullcontext()

    def names(self) -> frozenset[str]:
        """Return the names of the tensors whose values are in parameters; the model converts or skips all others."""
        return frozenset(name for name, pieces in self._pieces.items() if pieces)

    def checksums(self, model: torch.nn.Module, *, turn: int, turns: int) -> dict[str, str]:
        """Return a dict from piece to checksum for the tensors `turn`, `turn + turns`, ..., counted from 0 in the order of their names.

        So `turns` calls cover all tensors. A key, "name offset shape strides", says where the piece lies in the checkpoint tensor, in
        elements; shape and strides are numbers separated by commas. A checksum is "elements sum weighted-sum".
        """
        parameters = dict(model.named_parameters())
        sums_by_piece = {}
        for index, (name, pieces) in enumerate(sorted(self._pieces.items())):
            if index % turns != turn % turns:
                continue
            for piece in pieces:
                values = _view(parameters[piece.parameter], piece.place)
                first, second = self._sums.find(values, piece.source) or piece_checksum(values, piece.source)
                sizes, strides = (",".join(map(str, part)) for part in piece.source[1:])
                sums_by_piece[f"{name} {piece.source.offset} {sizes} {strides}"] = f"{values.numel()} {first} {second}"
        self._sums.clear()
        return sums_by_piece


class _Copies(TorchDispatchMode):  # type: ignore[misc]
    """Records the copies from given tensors into parameters, and keeps `sums` if there are any to keep."""

    def __init__(
        self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], sums: CopiedSums | None
    ) -> None:
        super().__init__()
        self.pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
        self._sources = _by_address(tensors)
        self._parameters = _by_address(parameters)
        self._sums = sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._copy(args[0], args[1]):
            return args[0]
        if self._sums is not None and func._schema.is_mutable:
            for tensor in filter(torch.is_tensor, tree_leaves((args, kwargs))):
                self._sums.overwritten(tensor)
        return func(*args, **(kwargs or {}))

    def _copy(self, target: Tensor, source: Tensor) -> bool:
        """Record the copy of `source` to `target` if it writes a piece. Returns whether this call has made the copy."""
        if target.shape != source.shape or target.dtype != source.dtype:
            return False
        tensor, parameter = _owner(self._sources, source), _owner(self._parameters, target)
        if tensor is None or parameter is None:
            return False
        piece = Piece(_region(source, tensor[1]), parameter[0], _region(target, parameter[1]))
        self.pieces[tensor[0]].append(piece)
        if self._sums is None or source.device.type != "cpu" or not _is_word_run(target, piece.source):
            return False
        self._sums.copy(target, source, piece.source)
        return True


def piece_checksum(values: Tensor, source: Region) -> tuple[int, int]:
    """Return what the elements of one piece add to the checksum of the whole tensor, as (sum, weighted sum).

    `values` are the elements, of 1, 2 or 4 bytes each; `source` says where in the whole tensor they belong.
    """
    size = values.element_size()
    if values.device.type == "cpu" and _is_word_run(values, source):
        return checksum(values, offset=source.offset * size // 4)
    integers = values.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    per_word = 4 // size
    rows = max(1, CHUNK // max(1, integers[:1].numel())) if integers.dim() else 1
    total = [0, 0]
    for start in range(0, len(integers) if integers.dim() else 1, rows):
        block = integers[start : start + rows] if integers.dim() else integers
        positions = _positions(source, start, block)
        bits = (block.long() & ((1 << 8 * size) - 1)) << (positions % per_word * (8 * size))
        words = positions // per_word + 1
        total[0] += int(bits.sum())
        total[1] += int((bits * words).sum())
    return total[0] & _MASK, total[1] & _MASK


def _is_word_run(values: Tensor, source: Region) -> bool:
    """Return whether the elements follow each other, in `values` as in the whole tensor, there from the start of a 32-bit word on."""
    if not values.is_contiguous() or source.offset * values.element_size() % 4:
        return False
    run = 1
    for length, stride in zip(reversed(source.shape), reversed(source.strides), strict=True):
        if length != 1 and stride != run:
            return False
        run *= length
    return True


def _positions(source: Region, start: int, block: Tensor) -> Tensor:
    """Return the index in the whole tensor of each element of `block`, which begins at row `start` of `source`."""
    positions = torch.full((), source.offset, dtype=torch.int64, device=block.device)
    for dimension, (length, stride) in enumerate(zip(block.shape, source.strides, strict=True)):
        first = start if dimension == 0 else 0
        along = (torch.arange(length, device=block.device) + first) * stride
        positions = positions + along.view(-1, *[1] * (block.dim() - dimension - 1))
    return positions


def _by_address(tensors: Mapping[str, Tensor]) -> dict[int, list[tuple[str, Tensor]]]:
    tensors_at: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        tensors_at.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    return tensors_at


def _owner(tensors: Mapping[int, list[tuple[str, Tensor]]], part: Tensor) -> tuple[str, Tensor] | None:
    """Return name and tensor of the one in whose memory `part` begins, None if there is none."""
    for name, tensor in tensors.get(part.untyped_storage().data_ptr(), ()):
        if tensor.data_ptr() <= part.data_ptr() < tensor.data_ptr() + max(tensor.nbytes, 1):
            return name, tensor
    return None


def _region(part: Tensor, tensor: Tensor) -> Region:
    offset = (part.data_ptr() - tensor.data_ptr()) // part.element_size()
    return Region(offset, tuple(part.shape), part.stride())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of `tensor` and of the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum(stride * (length - 1) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _view(parameter: Tensor, region: Region) -> Tensor:
    return parameter.detach().as_strided(region.shape, region.strides, parameter.storage_offset() + region.offset)
