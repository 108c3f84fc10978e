"""Kept samples for tests: completions with known numbers, and folders that hold them."""

import numpy as np

from rl_core.messages.samples import GENERATED, GIVEN, KeptSample
from rl_core.samples.lines import TRAIN, sample_line
from rl_core.samples.writer import SampleWriter


def kept(group="0-1", index=0, *, reward=0.5, text="answer", role="assistant", reason="stop", row=-1, **more):
    """Return a completion of two prompt tokens and three generated ones."""
    fields = {
        "group_id": group, "index": index, "prompt_index": 7, "info": {"ground_truth": "4"},
        "messages": (("user", "2+2=", 2), (role, text, 3)), "prompt_messages": 1, "reward": reward, "parts": {"format": 1.0},
        "reason": reason, "versions": (3, 4), "token_ids": np.arange(5, dtype=np.int32),
        "mask": np.array([GIVEN] * 2 + [GENERATED] * 3, np.uint8),
        "engine": np.array([np.nan, np.nan, -0.5, -0.25, -1e-6], np.float32),
        "token_versions": np.array([-1, -1, 3, 4, 4], np.int32), "row": row,
    }  # fmt: skip
    return KeptSample(**fields | more)


def line(sample, *, step=1, split=TRAIN, epoch=0, trainer=None):
    """Return the line and the entry of a sample."""
    return sample_line(
        sample, split=split, step=step, epoch=epoch, version=step - 1, trainer=trainer, pieces=list("abcde"), wall=1.5
    )


def write(folder, samples, *, step=1, split=TRAIN, epoch=0, limit=10**8, writer=None):
    """Write samples of one step to the output folder `folder`; return the writer."""
    writer = writer or SampleWriter(folder / "samples", limit=limit)
    lines = [line(sample, step=step, split=split, epoch=epoch) for sample in samples]
    assert writer.write(lines, name=f"e{epoch:04d}-s{step:07d}")
    return writer
