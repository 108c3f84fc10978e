"""What `rljob run --resume` continues: checked and reported before anything in the output folder is written."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.api.defaults import short
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.checkpoint.manifest import MANIFEST
from rl_core.checkpoint.store import LOST
from rl_core.runner.checkpoints import STATE_FILE
from rl_core.runner.invariants import refuse_changes

MOST = 8
"""Most differences that are listed."""
DEFAULTS = RLJobSpec.model_validate({"model": {"path": "none"}, "data": {"train": "none"}})
"""The values of fields that neither job gives."""


def resume_line(job: RLJob, folder: Path, resume: str) -> str:
    """Return which step of which folder the run continues, and every field that has another value now; "" with `resume` none.

    `resume` is auto, none or the path of a checkpoint. Raises ConfigError where the runner would refuse the job beside that checkpoint.
    The runner chooses the checkpoint itself: where the newest one is damaged, it takes an older one and says so.
    """
    newest = _newest(job, folder, resume)
    if newest is None:
        return "" if resume == "none" else f"{checkpoint_folder(job, folder)} holds no checkpoint: starts at step 0"
    checkpoint, state = newest
    refuse_changes(state, job.spec)
    old_values, new_values = dict(_leaves(state["changed"])), dict(_leaves(short(job.spec)))
    usual = dict(_leaves(DEFAULTS.model_dump(mode="json", by_alias=True)))
    listed = [
        f"{path} {_word(old_values.get(path, usual.get(path)))} -> {_word(new_values.get(path, usual.get(path)))}"
        for path in sorted({*old_values, *new_values})
        if old_values.get(path) != new_values.get(path)
    ]
    omitted = f" and {len(listed) - MOST} more" if len(listed) > MOST else ""
    changed = f"; different: {', '.join(listed[:MOST])}{omitted}" if listed else ""
    step, steps = state.get("step"), job.spec.algorithm.steps
    at_end = isinstance(step, int) and step >= steps
    finished = f"; nothing is left to train: raise algorithm.steps above {step}" if at_end else ""
    return f"resumes at step {step} of {checkpoint.parent.parent}{changed}{finished}{_abandoned(job, folder, step)}"


def _abandoned(job: RLJob, folder: Path, step: Any) -> str:
    """Return the part of the line that names the checkpoints after `step`, which the runner sets aside; "" if there are none."""
    root = checkpoint_folder(job, folder)
    names = [path.parent.name.rpartition("-")[2] for path in root.glob(f"step-*/{MANIFEST}")]
    steps = sorted(int(name) for name in names if name.isdecimal())
    later_steps = [str(later_step) for later_step in steps if isinstance(step, int) and later_step > step]
    if not later_steps:
        return ""
    steps_text = f"step{'s' if len(later_steps) > 1 else ''} {', '.join(later_steps)}"
    return f"; the newer checkpoints of {steps_text} are set aside as {root}/{LOST}step-*, and their metrics in {folder}/metrics.lost.jsonl"


def _newest(job: RLJob, folder: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint whose state can be read, with that state; None where there is none."""
    if resume == "none":
        return None
    saved = checkpoint_folder(job, folder).glob(f"step-*/{MANIFEST}")
    candidates = saved if resume == "auto" else [Path(resume) / MANIFEST]
    states = [state for path in candidates for state in _read(path.parent)]
    return max(states, key=lambda state: int(state[1].get("step", -1)), default=None)


def checkpoint_folder(job: RLJob, folder: Path) -> Path:
    """Return the folder of the checkpoints of a job that writes to `folder`."""
    return Path(job.spec.checkpoint.path) if job.spec.checkpoint.path else folder / "checkpoints"


def _read(checkpoint: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
    except (OSError, ValueError):
        return
    if isinstance(state, dict) and {"mathematics", "changed"} <= state.keys():
        yield checkpoint.resolve(), state


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every field that is no block."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _word(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
