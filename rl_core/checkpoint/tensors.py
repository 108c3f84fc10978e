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
    """What one file holds of a tensor."""

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
    held = {name: [box for box in boxes if box[0].numel()] for name, boxes in parts.items()}
    files, digests = max(map(len, held.values()), default=0), {}
    for number in range(files):
        path = folder / f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{files:05d}.safetensors"
        boxes = {name: boxes[number] for name, boxes in held.items() if len(boxes) > number}
        digests[path.name] = _write_file(path, boxes)
    if files:
        sync_folder(folder)
    return digests


def _write_file(path: Path, boxes: Mapping[str, Box]) -> str:
    """Write and sync a safetensors file; return its digest."""
    # Wider types first: every tensor is then aligned to its own.
    order = sorted(boxes, key=lambda name: (-boxes[name][0].element_size(), name))
    digest = blake3.blake3()
    with path.open("wb") as file:
        # One tensor after the other: of one that is no plain host memory there is a copy, for the time of its pieces.
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
    held = tensor.detach().cpu().contiguous()
    size = held.numel() * held.element_size()
    # Not by `numpy()`: torch would never let the storage be resized again, as offloading does.
    data = memoryview((ctypes.c_ubyte * size).from_address(held.data_ptr())).cast("B")
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
        with ExitStack() as opened:
            stored = _stored({file: opened.enter_context(safe_open(file, framework="pt")) for file in files})
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
            held = _Stored(reader.get_slice(name), tuple(offsets[name]["saved_offsets"]))
            stored.setdefault(name, []).append(held)
    return stored


def _check_shape(folder: Path, name: str, stored: list[_Stored], shape: tuple[int, ...]) -> None:
    if not stored:
        raise DataError(f"{folder} must hold tensor {name}, got none; the checkpoint belongs to another model")
    whole = [max(ends) for ends in zip(*(held.end for held in stored), strict=True)]
    if whole != list(shape):
        raise DataError(
            f"tensor {name} in {folder} must have shape {list(shape)}, got {whole}; the checkpoint belongs to another model"
        )


def _fill(folder: Path, name: str, target: Tensor, offset: tuple[int, ...], stored: list[_Stored]) -> None:
    """Copy into `target`, which begins at `offset`, what the files hold of its place."""
    filled = 0
    for held in stored:
        starts = [max(pair) for pair in zip(offset, held.offset, strict=True)]
        stops = [min(at + n, end) for at, n, end in zip(offset, target.shape, held.end, strict=True)]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            continue
        values = held.values[_box(starts, stops, held.offset)] if starts else held.values[...]
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
    return tuple(slice(start - at, stop - at) for start, stop, at in zip(starts, stops, origin, strict=True))
