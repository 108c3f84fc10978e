"""A checkpoint of 500 MB saved and loaded through the actor's verbs and the store, beside a raw copy of as many bytes. Prints JSON.

`save` is `begin` + `save_checkpoint` + `publish` (shards, digests, manifest, fsync of all), `load` is `load_checkpoint` with its check of
the digests. `raw_save` writes as many bytes from one buffer to one file on the same disk and syncs it, `raw_load` reads them into a
buffer that exists; before each load the files are dropped from the page cache, which a resume on another machine or after a while does
not find them in either. `pause` is what an asynchronous save takes of the training loop: `begin` and asking for it, and what the next
optimizer step still waits for the copy; the loop generates before that step, for `GENERATION` seconds here. `publish` is a thread's then.
`step_meanwhile` is the training step beside the writing thread, `step` one without. The sides take turns, medians.

    python benchmarks/checkpoint.py [--folder DIR] [--repetitions 5]
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from train_step import GROUP_SIZE, GROUPS, Row, make_folder, make_records, make_rows

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.checkpoint.store import CheckpointStore

TARGETS = {"save_over_raw": 0.5, "load_over_raw": 0.5, "pause_over_save": 0.1}


GENERATION = 0.5
"""Seconds of other work before the next optimizer step: rollouts generate, and the trainer runs its passes."""


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def write_raw(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 1 << 23):
            file.write(data[start : start + (1 << 23)])
        os.fsync(file.fileno())


def read_raw(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < len(into) and (count := file.readinto(into[at : at + (1 << 23)])):
            at += count


def forget(path: Path) -> None:
    """Drop synced files from the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Trainer:
    """One rank with 40 million parameters and AdamW, and its store."""

    def __init__(self, folder: Path) -> None:
        model = make_folder(512, 12, 4096, 1536, folder / "model")
        self.actor = FSDPActor(
            {
                "model": {"path": str(model)},
                "data": {"train": "unused.jsonl"},
                "algorithm": {"promptsPerStep": GROUPS, "groupSize": GROUP_SIZE},
            }
        )
        self.actor.init_worker()
        short = [Row(row.prompt[:4], row.answer[:4]) for row in make_rows("even")]
        self.store, self.records, self.steps = CheckpointStore(folder / "checkpoints", keep=1), make_records(short), 0
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def train(self) -> None:
        self.actor.load_batch(self.records)
        self.actor.compute_advantages_and_returns()
        self.actor.run_training()

    def save(self) -> Path:
        self.steps += 1
        staging = self.store.begin(self.steps, 0)
        return self.store.publish(staging, digests=self.actor.save_checkpoint(str(staging), self.steps)).path

    def save_in_background(self) -> dict[str, float]:
        """Return what the loop waits for, how long the write takes, and a training step meanwhile."""
        self.steps += 1
        began = time.perf_counter()
        staging = self.store.begin(self.steps, 0)
        written = self.actor.save_checkpoint(str(staging), self.steps, in_background=True)
        asked = time.perf_counter() - began
        writing = self.pool.submit(asyncio.run, written)
        time.sleep(GENERATION)
        waited = seconds(self.actor.manager._background.release)
        found = {"step_meanwhile": seconds(self.train)}
        digests = writing.result()
        found["written_after"] = time.perf_counter() - began
        published = seconds(lambda: self.store.publish(staging, digests=digests))
        return found | {"waited": waited, "published": published, "pause": asked + waited}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps(measure(folder, options.repetitions), indent=1))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, repetitions: int) -> dict[str, object]:
    trainer = Trainer(folder)
    published = trainer.save()
    size = sum(file.stat().st_size for file in published.rglob("*") if file.is_file())
    data = memoryview(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy())
    raw = folder / "raw"
    taken: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        found = {"raw_save": seconds(lambda: write_raw(raw, data))}
        forget(raw)
        found["raw_load"] = seconds(lambda: read_raw(raw, data))
        raw.unlink()
        found["save"] = seconds(trainer.save)
        newest = trainer.store.latest()
        assert newest is not None
        forget(newest.path)
        found["load"] = seconds(lambda path=str(newest.path): trainer.actor.load_checkpoint(path))
        found |= {"step": seconds(trainer.train)} | trainer.save_in_background()
        for name, value in found.items() if repetition else ():  # the first one pays for the pages
            taken.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "torch": torch.__version__,
        "bytes": size,
        "repetitions": repetitions,
        "load": os.getloadavg()[0],
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "raw_gb_per_second": {name: round(1e-9 * size / medians[f"raw_{name}"], 2) for name in ("save", "load")},
        "save_over_raw": round(medians["raw_save"] / medians["save"], 3),
        "load_over_raw": round(medians["raw_load"] / medians["load"], 3),
        "pause_over_save": round(medians["pause"] / medians["save"], 3),
        "targets": TARGETS,
    }


if __name__ == "__main__":
    main()
