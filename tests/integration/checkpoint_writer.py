"""Writes checkpoints of rising steps for ever, until killed: `python checkpoint_writer.py ROOT EPOCH`."""

import itertools
import sys

from rl_core.checkpoint.files import write_file
from rl_core.checkpoint.store import CheckpointStore


def main() -> None:
    store, epoch = CheckpointStore(sys.argv[1], keep=2), int(sys.argv[2])
    latest = store.resolve("auto")
    # The first save repeats the newest step, so that replacing one is interrupted too.
    for step in itertools.count(latest.step if latest else 0):
        staging = store.begin(step, epoch)
        (staging / "model").mkdir()
        for part in range(4):
            write_file(staging / "model" / f"shard-{part}", bytes([step % 251]) * 300_000)
        store.publish(staging, metrics={"reward": float(step)})
        print(step, flush=True)


if __name__ == "__main__":
    main()
