"""`LoadedLayout`: records where SGLang's own loader writes each tensor of a checkpoint, and computes checksums of these places later.

Runs in each tensor-parallel process of the engine. While the model loads weights, each copy from a given tensor into a parameter is
recorded as a piece: a part of the tensor and its place in the parameter. This works for every model that SGLang can load, because fused,
split and padded parameters are recorded as the loader fills them. The checksums of all pieces of a tensor, on all ranks, add up to the
checksum of the tensor in the manifest (`weights.manifest.checksum`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.weights.manifest import checksum

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


class LoadedLayout:
    """The pieces of all checkpoint tensors that were loaded into the model of this rank."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        """By the tensor's name, as of its first load. A later load that writes elsewhere shows in the checksums."""

    def record(self, model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Let `model` load `tensors`; record the pieces of those that it had not been given before."""
        given = list(tensors)
        new = {name: tensor for name, tensor in given if name not in self._pieces}
        if not new:
            model.load_weights(given)
            return
        with _Copies(new, dict(model.named_parameters())) as copies:
            model.load_weights(given)
        self._pieces.update(copies.pieces)

    def names(self) -> frozenset[str]:
        """Return the names of the tensors whose values are in parameters; the model converts or skips all others."""
        return frozenset(name for name, pieces in self._pieces.items() if pieces)

    def checksums(self, model: torch.nn.Module, *, turn: int, turns: int) -> dict[str, str]:
        """Return a dict from piece to checksum for the tensors `turn`, `turn + turns`, ..., counted from 0 in the order of their names.

        So `turns` calls cover all tensors. A key, "name offset shape strides", says where the piece lies in the checkpoint tensor, in
        elements; shape and strides are numbers separated by commas. A checksum is "elements sum weighted-sum".
        """
        parameters = dict(model.named_parameters())
        found = {}
        for index, (name, pieces) in enumerate(sorted(self._pieces.items())):
            if index % turns != turn % turns:
                continue
            for piece in pieces:
                values = _view(parameters[piece.parameter], piece.place)
                first, second = piece_checksum(values, piece.source)
                sizes, strides = (",".join(map(str, part)) for part in piece.source[1:])
                found[f"{name} {piece.source.offset} {sizes} {strides}"] = f"{values.numel()} {first} {second}"
        return found


class _Copies(TorchDispatchMode):  # type: ignore[misc]
    """Records the copies from given tensors into parameters."""

    def __init__(self, given: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.pieces: dict[str, list[Piece]] = {name: [] for name in given}
        self._given = _by_address(given)
        self._parameters = _by_address(parameters)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        return result

    def _record(self, place: Tensor, source: Tensor) -> None:
        if place.shape != source.shape or place.dtype != source.dtype:
            return
        found, parameter = _owner(self._given, source), _owner(self._parameters, place)
        if found is not None and parameter is not None:
            piece = Piece(_region(source, found[1]), parameter[0], _region(place, parameter[1]))
            self.pieces[found[0]].append(piece)


def piece_checksum(values: Tensor, source: Region) -> tuple[int, int]:
    """Return what the elements of one piece add to the checksum of the whole tensor, as (sum, weighted sum).

    `values` are the elements, of 1, 2 or 4 bytes each; `source` says where in the whole tensor they belong.
    """
    size = values.element_size()
    start = source.offset * size
    if values.device.type == "cpu" and values.is_contiguous() and _is_one_run(source) and start % 4 == 0:
        return checksum(values, offset=start // 4)
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


def _is_one_run(source: Region) -> bool:
    """Return whether the elements of `source` follow each other in the whole tensor."""
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
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    return found


def _owner(tensors: Mapping[int, list[tuple[str, Tensor]]], part: Tensor) -> tuple[str, Tensor] | None:
    """Return name and tensor of the one in whose memory `part` begins, None if there is none."""
    for name, tensor in tensors.get(part.untyped_storage().data_ptr(), ()):
        if tensor.data_ptr() <= part.data_ptr() < tensor.data_ptr() + max(tensor.nbytes, 1):
            return name, tensor
    return None


def _region(part: Tensor, whole: Tensor) -> Region:
    offset = (part.data_ptr() - whole.data_ptr()) // part.element_size()
    return Region(offset, tuple(part.shape), part.stride())


def _view(parameter: Tensor, place: Region) -> Tensor:
    return parameter.detach().as_strided(place.shape, place.strides, parameter.storage_offset() + place.offset)
