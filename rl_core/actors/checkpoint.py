"""What an actor saves and how it comes back: shards of model and optimizer, counters, random state per rank.

model/shard-*.safetensors  optimizer/shard-*.safetensors  rng/rank-00000.json  actor.json
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_core.actors.ranks import Ranks
from rl_core.actors.schedule import OptimizerCounts
from rl_core.actors.slices import LocalSlice
from rl_core.api.errors import DataError
from rl_core.checkpoint.files import sync_folder, write_failure, write_file
from rl_core.checkpoint.manifest import MANIFEST, read_manifest
from rl_core.checkpoint.state import capture_rng, derive_rng, restore_rng
from rl_core.checkpoint.tensors import read_shards, write_shard

COUNTERS = "actor.json"
FORMAT = 1

Slices = Mapping[str, Sequence[LocalSlice]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What is saved besides tensors and random state."""

    step: int
    global_step: int
    world_size: int
    """Ranks that saved it."""
    counts: OptimizerCounts
    consecutive_skips: list[float]
    """Norms of the optimizer steps skipped in a row."""
    optimizer_steps: dict[str, float]
    """Parameter name -> AdamW steps."""

    def to_json(self) -> bytes:
        """Return the file's content; norms as text, as JSON has no infinity."""
        norms = [repr(norm) for norm in self.consecutive_skips]
        return json.dumps({"format": FORMAT, **asdict(self), "consecutive_skips": norms}).encode()

    @classmethod
    def read(cls, folder: Path) -> "Counters":
        """Return the counters in `folder`. Raises FileNotFoundError without any, DataError for damaged or foreign ones."""
        path = folder / COUNTERS
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder} must hold {COUNTERS} of an actor checkpoint, got none; choose another one"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} must be JSON: {error}; resume from another checkpoint") from error
        if found.get("format") != FORMAT:
            raise DataError(
                f"{path} must have format {FORMAT}, got {found.get('format')!r}; use the version that wrote it"
            )
        return cls(
            step=found["step"],
            global_step=found["global_step"],
            world_size=found["world_size"],
            counts=OptimizerCounts(**found["counts"]),
            consecutive_skips=[float(norm) for norm in found["consecutive_skips"]],
            optimizer_steps=found["optimizer_steps"],
        )


def save(folder: Path, ranks: Ranks, counters: Counters, *, model: Slices, optimizer: Slices) -> None:
    """Write and sync this rank's part: the slices given, each by one rank.

    Raises InfrastructureError when the storage refuses; the caller drops the folder.
    """
    try:
        (folder / "rng").mkdir(parents=True, exist_ok=True)
        for name, slices in (("model", model), ("optimizer", optimizer)):
            boxes = {
                key: [(box.tensor, box.offset) for part in parts for box in part.boxes()]
                for key, parts in slices.items()
            }
            write_shard(folder / name, boxes, rank=ranks.rank)
        write_file(_rng_file(folder, ranks.rank), json.dumps(capture_rng()).encode())
        if ranks.rank == 0:
            write_file(folder / COUNTERS, counters.to_json())
        sync_folder(folder / "rng")
        sync_folder(folder)
    except OSError as error:
        raise write_failure(
            f"checkpoint of step {counters.step}, part of actor rank {ranks.rank}", folder, error
        ) from error


def load(folder: Path, ranks: Ranks, *, model: Slices, optimizer: Slices, seed: int) -> Counters:
    """Fill the slices and the random state and return the counters; every rank reads what it stores.

    `seed`: of the job; a rank of another world than the one that saved derives its random state from it.
    Raises FileNotFoundError without a checkpoint, DataError naming file or tensor for a damaged or foreign one.
    """
    counters = Counters.read(folder)
    _verify(folder, ranks)
    for name, slices in (("model", model), ("optimizer", optimizer)):
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
