"""Checkpoints with real kills: whenever the writer dies, what is visible is complete, and the next epoch goes on from there."""

import random
import subprocess
import sys
import time
from pathlib import Path

from rl_core.checkpoint.store import CheckpointStore

WRITER = Path(__file__).with_name("checkpoint_writer.py")


def killed_writer(root, epoch, seconds):
    """Let a writer work for `seconds` after its first checkpoint, kill it, return the last step it said it published."""
    with subprocess.Popen(
        [sys.executable, str(WRITER), str(root), str(epoch)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline()]
        time.sleep(seconds)
        writer.kill()
        said += writer.stdout.read().splitlines()
    return int([line for line in said if line.strip()][-1])


def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    generator, newest = random.Random(0), -1
    for epoch in range(6):
        said = killed_writer(tmp_path, epoch, generator.uniform(0, 0.05))
        store = CheckpointStore(tmp_path, keep=2)
        found = store.checkpoints()
        for checkpoint in found:
            checkpoint.manifest.verify(checkpoint.path)
            shards = list((checkpoint.path / "model").iterdir())
            assert len(shards) == 4
            assert all(shard.read_bytes() == bytes([checkpoint.step % 251]) * 300_000 for shard in shards)
        # The step being replaced may be the one moment's absentee; the one before it is then there.
        assert found[-1].step >= max(said - 1, newest - 1)
        newest = max(newest, found[-1].step)
    store.begin(newest + 1, 6)
    assert store.latest().step == newest
