"""What an FSDP actor saves and how it comes back: shards of model and optimizer, counters, random state per rank.

model/shard-*.safetensors  optimizer/shard-*.safetensors  rng/rank-00000.json  actor.json
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rl_core.actors.fsdp.optimizer import named_moments, set_step_counters, step_counters
from rl_core.actors.hf import stored_tensors
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.shards import global_range, is_sharded, local_tensor
from rl_core.api.errors import DataError
from rl_core.checkpoint.files import sync_folder, write_failure, write_file
from rl_core.checkpoint.manifest import MANIFEST, read_manifest
from rl_core.checkpoint.state import capture_rng, derive_rng, restore_rng
from rl_core.checkpoint.tensors import read_shards, write_shard

if TYPE_CHECKING:
    from rl_core.actors.fsdp.manager import FSDPModelManager

COUNTERS = "actor.json"
FORMAT = 1


def save(manager: "FSDPModelManager", folder: Path, step: int) -> None:
    """Write and sync this rank's part. Raises InfrastructureError when the storage refuses; the caller drops the folder."""
    rank = manager.ranks.rank
    try:
        (folder / "rng").mkdir(parents=True, exist_ok=True)
        write_shard(folder / "model", _parts(manager, stored_tensors(manager.model)), rank=rank)
        write_shard(folder / "optimizer", _parts(manager, named_moments(manager.model, manager.optimizer)), rank=rank)
        write_file(folder / "rng" / f"rank-{rank:05d}.json", json.dumps(capture_rng()).encode())
        if rank == 0:
            write_file(folder / COUNTERS, json.dumps(_counters(manager, step)).encode())
        sync_folder(folder / "rng")
        sync_folder(folder)
    except OSError as error:
        raise write_failure(f"checkpoint of step {step}, part of actor rank {rank}", folder, error) from error


def load(manager: "FSDPModelManager", folder: Path) -> None:
    """Fill model, optimizer, schedule, counters and random state; every rank reads what it owns.

    Raises FileNotFoundError without a checkpoint, DataError naming file or tensor for a damaged or foreign one.
    """
    try:
        counters = json.loads((folder / COUNTERS).read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} must hold {COUNTERS} of an actor checkpoint, got none; choose another one"
        ) from error
    except ValueError as error:
        raise DataError(f"{folder / COUNTERS} must be JSON: {error}; resume from another checkpoint") from error
    if counters.get("format") != FORMAT:
        raise DataError(
            f"{folder / COUNTERS} must have format {FORMAT}, got {counters.get('format')!r}; use the version that wrote it"
        )
    _verify(folder, manager)
    read_shards(folder / "model", stored_tensors(manager.model))
    read_shards(folder / "optimizer", named_moments(manager.model, manager.optimizer))
    _restore_counters(manager, counters)
    _restore_rng(manager, folder, counters)


def _parts(manager: "FSDPModelManager", tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return what this rank writes: its own slices; of whole tensors only rank 0."""
    parts: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor.detach())
        if is_sharded(tensor):
            parts[name] = (local, (global_range(tensor)[0], *(0,) * (local.dim() - 1)))
        elif manager.ranks.rank == 0:
            parts[name] = (local, (0,) * local.dim())
    return parts


def _counters(manager: "FSDPModelManager", step: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step,
        "global_step": manager.global_step,
        "world_size": manager.ranks.size,
        "counts": asdict(manager.counts),
        "consecutive_skips": [repr(norm) for norm in manager.consecutive_skips],
        "optimizer_steps": step_counters(manager.model, manager.optimizer),
        "scaler": manager.scaler.state_dict(),
    }


def _verify(folder: Path, manager: "FSDPModelManager") -> None:
    """Compare digests with the manifest: rank r checks every world_size-th file. A save outside a store has no manifest."""
    if not (folder / MANIFEST).is_file():
        return
    manifest = read_manifest(folder)
    names = sorted(manifest.files)[manager.ranks.rank :: manager.ranks.size]
    manifest.verify(folder, tuple(names))


def _restore_counters(manager: "FSDPModelManager", counters: dict[str, Any]) -> None:
    manager.counts = OptimizerCounts(**counters["counts"])
    manager.consecutive_skips = [float(norm) for norm in counters["consecutive_skips"]]
    manager.global_step = counters["global_step"]
    manager.scaler.load_state_dict(counters["scaler"])
    set_step_counters(manager.model, manager.optimizer, counters["optimizer_steps"])
    scheduler = manager.scheduler
    scheduler.last_epoch = manager.counts.applied
    rates = [
        base * factor(manager.counts.applied)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(manager.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _restore_rng(manager: "FSDPModelManager", folder: Path, counters: dict[str, Any]) -> None:
    if counters["world_size"] == manager.ranks.size:
        restore_rng(json.loads((folder / "rng" / f"rank-{manager.ranks.rank:05d}.json").read_text()))
    else:
        derive_rng(manager.cfg.algorithm.seed, counters["step"], manager.ranks.rank)
