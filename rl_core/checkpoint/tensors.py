"""Sharded tensors of a checkpoint: each rank writes its parts as safetensors files, and any number of ranks can read them back.

The files have the format of torch Distributed Checkpoint's Hugging Face storage (`DCP_SHARDING_INFO` in the header), so any DCP reader
can load them. Ranks do not communicate and nothing is pickled. A tensor is written from its own memory and hashed on the way; the
writer of the safetensors library would copy all tensors first and hold the interpreter lock while it writes.
"""

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.checkpoint.files import sync_folder
from rl_core.checkpoint.safetensors_header import header

SHARDING = "DCP_SHARDING_INFO"
"""Entry of a file's header: where each of its tensors begins in the full one."""
CHUNK_BYTES = 2**20
"""Bytes written and hashed at a time."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The part of a tensor that one file holds."""

    values: Any
    """Reader of the tensor in the file: indexing reads no more than is asked for."""
    offset: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + n for start, n in zip(self.offset, self.values.get_shape(), strict=True))


Box = tuple[Tensor, tuple[int, ...]]
"""(local tensor, offset of its first element in the full tensor)."""


def write_shard(folder: Path, parts: Mapping[str, Sequence[Box]], *, rank: int) -> dict[str, str]:
    """Write and sync this rank's `parts`: name -> what the rank holds of the tensor, in boxes that do not overlap.

    A file contains at most one box of each tensor, so a rank writes as many files as its tensor with the most boxes has boxes.
    Returns file name -> digest. Raises OSError as the storage does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nonempty = {name: [box for box in boxes if box[0].numel()] for name, boxes in parts.items()}
    files, digests = max(map(len, nonempty.values()), default=0), {}
    for number in range(files):
        path = folder / f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{files:05d}.safetensors"
        boxes = {name: boxes[number] for name, boxes in nonempty.items() if len(boxes) > number}
        digests[path.name] = _write_file(path, boxes)
    if files:
        sync_folder(folder)
    return digests


def _write_file(path: Path, boxes: Mapping[str, Box]) -> str:
    """Write and sync a safetensors file; return its digest."""
    # Tensors of wider types come first, so that every tensor is aligned to its type.
    order = sorted(boxes, key=lambda name: (-boxes[name][0].element_size(), name))
    digest = blake3.blake3()
    with path.open("wb") as file:
        # Tensors are written one after the other. One that is not plain host memory is copied, until its chunks are written.
        content: Iterator[bytes | memoryview] = chain(
            [_header(boxes, order)], *(_chunks(boxes[name][0]) for name in order)
        )
        for data in content:
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(boxes: Mapping[str, Box], order: Sequence[str]) -> bytes:
    offsets = {name: {"saved_offsets": list(offset)} for name, (_, offset) in boxes.items()}
    tensors = [(name, boxes[name][0].dtype, tuple(boxes[name][0].shape)) for name in order]
    return header(tensors, metadata={"DCP_VERSION": "1.0", SHARDING: json.dumps(offsets)})


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in chunks that stay in the CPU cache between writing and hashing."""
    host_tensor = tensor.detach().cpu().contiguous()
    size = host_tensor.numel() * host_tensor.element_size()
    # `numpy()` is not used, because torch would then never let the storage be resized, as offloading does.
    data = memoryview((ctypes.c_ubyte * size).from_address(host_tensor.data_ptr())).cast("B")
    for start in range(0, size, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def read_shards(folder: Path, parts: Mapping[str, Sequence[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]]) -> None:
    """Fill `parts` in place from the files of all ranks: name -> (local tensor, its offset in the full tensor, full shape) of each box.

    Raises FileNotFoundError without files, DataError naming tensor and folder for a missing tensor, another shape or type.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} must hold the safetensors of a checkpoint, got none; choose another checkpoint"
        )
    try:
        with ExitStack() as stack:
            stored = _stored({file: stack.enter_context(safe_open(file, framework="pt")) for file in files})
            for name, boxes in parts.items():
                for _, _, shape in boxes:
                    _check_shape(folder, name, stored.get(name, []), shape)
            for name, boxes in parts.items():
                for tensor, offset, _ in boxes:
                    _fill(folder, name, tensor.detach(), offset, stored[name])
    except SafetensorError as error:
        raise DataError(f"tensors in {folder} cannot be read: {error}; resume from another checkpoint") from error


def _stored(readers: Mapping[Path, Any]) -> dict[str, list[_Stored]]:
    stored: dict[str, list[_Stored]] = {}
    for file, reader in readers.items():
        metadata = reader.metadata() or {}
        if SHARDING not in metadata:
            raise DataError(f"{file} must have {SHARDING} in its header, got none; it is no part of a checkpoint")
        offsets = json.loads(metadata[SHARDING])
        for name in reader.keys():  # noqa: SIM118
            piece = _Stored(reader.get_slice(name), tuple(offsets[name]["saved_offsets"]))
            stored.setdefault(name, []).append(piece)
    return stored


def _check_shape(folder: Path, name: str, stored: list[_Stored], shape: tuple[int, ...]) -> None:
    if not stored:
        raise DataError(f"{folder} must hold tensor {name}, got none; the checkpoint belongs to another model")
    full_shape = [max(ends) for ends in zip(*(piece.end for piece in stored), strict=True)]
    if full_shape != list(shape):
        raise DataError(
            f"tensor {name} in {folder} must have shape {list(shape)}, got {full_shape}; the checkpoint belongs to another model"
        )


def _fill(folder: Path, name: str, target: Tensor, offset: tuple[int, ...], stored: list[_Stored]) -> None:
    """Copy the stored elements into `target`, which begins at `offset` of the full tensor."""
    filled = 0
    for piece in stored:
        starts = [max(pair) for pair in zip(offset, piece.offset, strict=True)]
        stops = [min(begin + n, end) for begin, n, end in zip(offset, target.shape, piece.end, strict=True)]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            continue
        values = piece.values[_box(starts, stops, piece.offset)] if starts else piece.values[...]
        if values.dtype != target.dtype:
            raise DataError(
                f"tensor {name} in {folder} must be {target.dtype}, got {values.dtype}; resume with the saved model.dtype"
            )
        target[_box(starts, stops, offset)].copy_(values)
        filled += values.numel()
    if filled != target.numel():
        raise DataError(
            f"the files in {folder} must hold all of tensor {name}, got {filled} of {target.numel()} elements; resume from another checkpoint"
        )


def _box(starts: list[int], stops: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start - base, stop - base) for start, stop, base in zip(starts, stops, origin, strict=True))
