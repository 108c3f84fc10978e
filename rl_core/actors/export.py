"""Hugging Face folders out: configuration, tokenizer files, safetensors shards and index, staged and renamed.

Tensors are written as they arrive, one at a time, so that a sharded model is never gathered whole.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from rl_core.actors.hf import INDEX, SINGLE
from rl_core.checkpoint.files import sync_folder, write_failure, write_file

MAX_SHARD_BYTES = 5 * 10**9
SYNC_BYTES = 256 * 1024 * 1024
"""Written between two syncs: the other ranks stand in the collective of the next tensor meanwhile, whose deadline a sync of a whole shard to
slow storage would miss."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """One tensor of an export, known before its values are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the size in the file."""
        return int(self.dtype.itemsize) * math.prod(self.shape)


def export_folder(
    target: str | Path, *, source: str | Path, plans: Sequence[TensorPlan], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a model folder at `target` (replaced when it exists) with everything but the weights taken from `source`.

    `tensors` yields (name, CPU tensor) in the order of `plans`. Raises InfrastructureError when the storage refuses; what
    was at `target` is then still there.
    """
    target = Path(target)
    staging = target.with_name(f".{target.name}.staging")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _copy_settings(Path(source), staging, plans[0].dtype)
        _write_weights(staging, plans, iter(tensors))
        sync_folder(staging)
        _replace(staging, target)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise write_failure("the exported model", target, error) from error


def _copy_settings(source: Path, staging: Path, dtype: torch.dtype) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and not path.name.startswith("."):
            write_file(staging / path.name, path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_file(staging / "config.json", json.dumps(config, indent=2, sort_keys=True).encode())


def _write_weights(staging: Path, plans: Sequence[TensorPlan], tensors: Iterator[tuple[str, Tensor]]) -> None:
    shards = list(_shards(plans))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (staging / file_name).open("wb") as file:
            _write_header(file, shard)
            waiting = 0
            for plan in shard:
                _write_tensor(file, plan, *next(tensors))
                waiting += plan.nbytes
                if waiting >= SYNC_BYTES:
                    _sync(file)
                    waiting = 0
            _sync(file)
        weight_map |= dict.fromkeys((plan.name for plan in shard), file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(plan.nbytes for plan in plans)}, "weight_map": weight_map}
        write_file(staging / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _shards(plans: Sequence[TensorPlan]) -> Iterator[list[TensorPlan]]:
    shard: list[TensorPlan] = []
    size = 0
    for plan in plans:
        if shard and size + plan.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(plan)
        size += plan.nbytes
    yield shard


def _write_header(file: IO[bytes], shard: Sequence[TensorPlan]) -> None:
    """Write the safetensors header: its length as little-endian uint64, then JSON padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in shard:
        end = offset + plan.nbytes
        header[plan.name] = {"dtype": CODES[plan.dtype], "shape": plan.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: IO[bytes], plan: TensorPlan, name: str, tensor: Tensor) -> None:
    if name != plan.name or tuple(tensor.shape) != plan.shape:
        raise RuntimeError(f"export expects {plan.name} {plan.shape}, got {name} {tuple(tensor.shape)}; this is a bug")
    data = tensor.detach().to(device="cpu", dtype=plan.dtype).contiguous().reshape(-1)
    file.write(memoryview(data.view(torch.uint8).numpy()))


def _replace(staging: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
