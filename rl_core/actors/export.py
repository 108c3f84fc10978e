"""Writes a Hugging Face model folder: configuration, tokenizer files, safetensors shards and their index.

Tensors are written one at a time as they arrive, so that a sharded model is never gathered as a whole. The folder is written under a
temporary name and renamed at the end, so that a failed export leaves the previous folder.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import torch
from torch import Tensor

from rl_core.actors.hf import INDEX, SINGLE
from rl_core.checkpoint.files import sync_folder, write_failure, write_file
from rl_core.checkpoint.safetensors_header import header

MAX_SHARD_BYTES = 5 * 10**9
SYNC_BYTES = 256 * 1024 * 1024
"""Bytes written between two syncs of the file. During a sync the other ranks wait in the collective of the next tensor; syncing a whole
shard to slow storage at once could exceed its deadline."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """Name, shape and type of a tensor of an export, before its values are gathered."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        return int(self.dtype.itemsize) * math.prod(self.shape)


def export_folder(
    target: str | Path,
    *,
    source: str | Path,
    plans: Sequence[TensorPlan],
    tensors: Iterable[tuple[str, Tensor]],
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a model folder at `target`, replacing an existing one. Everything but the weights is copied from `source`.

    `tensors` yields (name, CPU tensor) in the order of `plans`. `files` are further files by relative path. Raises InfrastructureError when
    the storage fails; the previous folder is then still there.
    """
    with staged(Path(target), "the exported model") as staging:
        _copy_settings(Path(source), staging, plans[0].dtype)
        _write_weights(staging, plans, iter(tensors))
        for name, data in files.items():
            (staging / name).parent.mkdir(exist_ok=True)
            write_file(staging / name, data)
            sync_folder((staging / name).parent)


@contextmanager
def staged(target: Path, what: str) -> Iterator[Path]:
    """Yield a folder that takes the place of `target` at the end of the block.

    After an error in the block the yielded folder is deleted and `target` is untouched.

    Raises InfrastructureError, which names `what`, when the storage fails; the previous folder is then still there.
    """
    staging = target.with_name(f".{target.name}.staging")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        sync_folder(staging)
        _replace(staging, target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_failure(what, target, error, way_out="free space") from error
        raise


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
            file.write(header((plan.name, plan.dtype, plan.shape) for plan in shard))
            unsynced_bytes = 0
            for plan in shard:
                _write_tensor(file, plan, *next(tensors))
                unsynced_bytes += plan.nbytes
                if unsynced_bytes >= SYNC_BYTES:
                    _sync(file)
                    unsynced_bytes = 0
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


def _write_tensor(file: IO[bytes], plan: TensorPlan, name: str, tensor: Tensor) -> None:
    if name != plan.name or tuple(tensor.shape) != plan.shape:
        raise RuntimeError(f"export expects {plan.name} {plan.shape}, got {name} {tuple(tensor.shape)}; this is a bug")
    data = tensor.detach().to(device="cpu", dtype=plan.dtype).contiguous().reshape(-1)
    file.write(memoryview(data.view(torch.uint8).numpy()))


def _replace(staging: Path, target: Path) -> None:
    backup = target.with_name(f".{target.name}.old")
    shutil.rmtree(backup, ignore_errors=True)
    if target.exists():
        target.rename(backup)
    try:
        staging.rename(target)
    except OSError:
        if backup.exists():
            backup.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(backup, ignore_errors=True)
