"""The files of an actor in a checkpoint: shards of model and optimizer, counters, and the random state of each rank.

model/shard-*.safetensors  optimizer/shard-*.safetensors  rng/rank-00000.json  actor.json
reference/shard-*.safetensors  the reference policy, once it is not the initial model any more
"""

import concurrent.futures
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.slices import Slices
from rl_core.api.errors import DataError
from rl_core.checkpoint.background import begin
from rl_core.checkpoint.files import sync_folder, write_failure, write_file
from rl_core.checkpoint.manifest import MANIFEST, read_manifest
from rl_core.checkpoint.state import capture_rng, derive_rng, restore_rng
from rl_core.checkpoint.tensors import Box, read_shards, write_shard

COUNTERS = "actor.json"
REFERENCE = "reference"
"""Folder of the reference policy."""
FORMAT = 1

Boxes = Mapping[str, Sequence[Box]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """The counters of an actor in a checkpoint."""

    step: int
    """Step after which the checkpoint was saved."""
    global_step: int
    """Last trained step, which is the version of the weights."""
    world_size: int
    """Number of ranks that saved the checkpoint."""
    counts: OptimizerCounts
    """Numbers of optimizer steps by result."""
    consecutive_skips: list[float]
    """Gradient norms of the most recent optimizer steps, if they were all skipped."""
    optimizer_steps: dict[str, float]
    """Number of AdamW steps of each parameter, by name."""
    lora: dict[str, Any] | None = None
    """Identity of the adapters, if the checkpoint has only these: see `ModelManager`. None for a checkpoint of all weights."""

    def to_json(self) -> bytes:
        """Return the content of the file. Norms are written as text, because JSON has no infinity."""
        norms = [repr(norm) for norm in self.consecutive_skips]
        return json.dumps({"format": FORMAT, **asdict(self), "consecutive_skips": norms}).encode()

    @classmethod
    def read(cls, folder: Path) -> "Counters":
        """Read the counters in `folder`.

        Raises FileNotFoundError when there are none, DataError when they are damaged or of another format.
        """
        path = folder / COUNTERS
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder} must hold {COUNTERS} of an actor checkpoint, got none; choose another one"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} must be JSON: {error}; resume from another checkpoint") from error
        if fields.get("format") != FORMAT:
            raise DataError(
                f"{path} must have format {FORMAT}, got {fields.get('format')!r}; use the version that wrote it"
            )
        return cls(
            step=fields["step"],
            global_step=fields["global_step"],
            world_size=fields["world_size"],
            counts=OptimizerCounts(**fields["counts"]),
            consecutive_skips=[float(norm) for norm in fields["consecutive_skips"]],
            optimizer_steps=fields["optimizer_steps"],
            lora=fields.get("lora"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """The files that one rank writes to a checkpoint."""

    step: int
    rank: int
    model: Boxes
    optimizer: Boxes
    reference: Boxes
    rng: bytes
    counters: bytes | None
    """Content of the file of counters on rank 0; None on other ranks."""

    @classmethod
    def of(cls, ranks: Ranks, counters: Counters, *, model: Slices, optimizer: Slices, reference: Slices) -> "RankPart":
        """Return the part made of these slices. It shares memory with them."""
        return cls(
            step=counters.step,
            rank=ranks.rank,
            model=_boxes(model),
            optimizer=_boxes(optimizer),
            reference=_boxes(reference),
            rng=json.dumps(capture_rng()).encode(),
            counters=counters.to_json() if ranks.rank == 0 else None,
        )

    def write(self, folder: Path) -> dict[str, str]:
        """Write and sync the files; return relative path -> digest.

        Raises InfrastructureError when the storage fails; the caller then deletes the folder.
        """
        try:
            (folder / "rng").mkdir(parents=True, exist_ok=True)
            digests = {
                f"{name}/{file}": digest
                for name, boxes in (("model", self.model), ("optimizer", self.optimizer), (REFERENCE, self.reference))
                if boxes or name != REFERENCE
                for file, digest in write_shard(folder / name, boxes, rank=self.rank).items()
            }
            path = _rng_file(folder, self.rank)
            digests[path.relative_to(folder).as_posix()] = write_file(path, self.rng)
            if self.counters is not None:
                digests[COUNTERS] = write_file(folder / COUNTERS, self.counters)
            sync_folder(folder / "rng")
            sync_folder(folder)
        except OSError as error:
            raise write_failure(
                f"checkpoint of step {self.step}, part of actor rank {self.rank}", folder, error
            ) from error
        return digests


class BackgroundWriter:
    """Copies a rank's part and writes the copy in a background thread; one part at a time.

    The memory of the copy is reused for the next one. It has the size of model and optimizer on this rank, and is page-locked when they
    are on an accelerator.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, str, int], Tensor] = {}
        self._writing: concurrent.futures.Future[dict[str, str]] | None = None
        self._copied = threading.Event()
        """Not set while the thread reads model and optimizer."""
        self._copied.set()

    def write(self, part: RankPart, folder: Path) -> "concurrent.futures.Future[dict[str, str]]":
        """Start to copy and write the part; return a future of the result of `RankPart.write`. Waits until the previous part is written."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])  # it is written from the same memory
        self._copied.clear()
        self._writing = begin(lambda: self._copy_of(part).write(folder))
        return self._writing

    def wait_copied(self) -> None:
        """Wait until the background thread has copied model and optimizer.

        Must be called before they change, so that a copy never mixes two steps.
        """
        self._copied.wait()

    def _copy_of(self, part: RankPart) -> RankPart:
        try:
            return replace(
                part,
                model=self._copy("model", part.model),
                optimizer=self._copy("optimizer", part.optimizer),
                reference=self._copy(REFERENCE, part.reference),
            )
        finally:
            self._copied.set()

    def _copy(self, kind: str, boxes: Boxes) -> Boxes:
        copied = {
            name: [
                (self._copy_to_buffer((kind, name, number), tensor), offset)
                for number, (tensor, offset) in enumerate(parts)
            ]
            for name, parts in boxes.items()
        }
        for device in {tensor.device for parts in boxes.values() for tensor, _ in parts if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copied

    def _copy_to_buffer(self, key: tuple[str, str, int], tensor: Tensor) -> Tensor:
        buffer = self._memory.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _boxes(slices: Slices) -> Boxes:
    return {key: [(box.tensor, box.offset) for part in parts for box in part.boxes()] for key, parts in slices.items()}


def has_reference(folder: Path) -> bool:
    """Return whether a checkpoint has a reference policy; otherwise that of its run was the initial model."""
    return (folder / REFERENCE).is_dir()


def load(folder: Path, ranks: Ranks, *, model: Slices, optimizer: Slices, reference: Slices, seed: int) -> Counters:
    """Load a checkpoint: fill the slices, restore the random state, and return the counters. Every rank reads what it stores.

    `reference` is filled where the checkpoint has a reference policy. `seed` is the job's; if the number of ranks differs from that of the
    checkpoint, the random state is derived from it. Raises FileNotFoundError when there is no checkpoint, and DataError naming the file or
    tensor that is damaged or of another model.
    """
    counters = Counters.read(folder)
    _verify(folder, ranks)
    kinds = [("model", model), ("optimizer", optimizer), *([(REFERENCE, reference)] if has_reference(folder) else [])]
    for name, slices in kinds:
        read_shards(
            folder / name,
            {
                key: [(box.tensor, box.offset, box.shape) for part in parts for box in part.boxes()]
                for key, parts in slices.items()
            },
        )
    if counters.world_size == ranks.size:
        restore_rng(json.loads(_rng_file(folder, ranks.rank).read_text()))
    else:
        derive_rng(seed, counters.step, ranks.rank)
    return counters


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / "rng" / f"rank-{rank:05d}.json"


def _verify(folder: Path, ranks: Ranks) -> None:
    """Compare digests with the manifest: rank r checks every size-th file. A save outside a store has no manifest."""
    if not (folder / MANIFEST).is_file():
        return
    manifest = read_manifest(folder)
    manifest.verify(folder, tuple(sorted(manifest.files)[ranks.rank :: ranks.size]))
